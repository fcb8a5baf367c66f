"""The Python library: streaming, seeds, log-probabilities."""

import math

import specdec


def main() -> None:
    with specdec.load("mini") as llm:
        for chunk in llm.stream("def quicksort(items):", max_tokens=32, temperature=0):
            print(chunk.text, end="", flush=True)
        print()
        params = specdec.SamplingParams(temperature=0.8, seed=7, max_tokens=16, logprobs=1)
        one, two = (llm.generate("class Stack:", params) for _ in range(2))
    print("the same seed, the same text:", one.text == two.text)
    print(f"its first token had a chance of {math.exp(one.logprobs[0].logprob):.2f}")


if __name__ == "__main__":
    main()
