"""Many prompts at once, without a server. Each answer is what it would be alone."""

import specdec

PROMPTS = [f"def {name}(items):\n" for name in ("first", "last", "total", "largest", "reverse")]


def main() -> None:
    with specdec.load("mini") as llm:
        answers = llm.generate_all(PROMPTS, max_tokens=24, temperature=0)
        alone = llm.generate(PROMPTS[0], max_tokens=24, temperature=0)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}{answer.text.rstrip()}\n# tau {answer.acceptance.tau:.2f}\n")
    print("equal" if answers[0].token_ids == alone.token_ids else "DIFFERENT")


if __name__ == "__main__":
    main()
