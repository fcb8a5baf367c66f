"""A question about a picture, with speculation and without: the same answer.

python examples/pictures.py google/gemma-4-E4B-it cat.jpg
"""

import sys

import specdec


def main(model: str, picture: str) -> None:
    question = [{"image": picture}, {"text": "What is in this picture?"}]
    messages = [{"role": "user", "content": question}]
    answers = []
    for drafter in ("ngram", "none"):
        with specdec.load(model, drafter=drafter, max_len=1024) as llm:
            answer = llm.chat(messages, max_tokens=24, temperature=0)
        answers.append(answer.token_ids)
        print(f"{drafter}: {len(answer.prompt_ids)} tokens in, tau {answer.acceptance.tau:.2f}")
    print(answer.text)
    print("equal" if answers[0] == answers[1] else "different")


if __name__ == "__main__":
    main(*sys.argv[1:])
