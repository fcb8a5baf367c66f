"""Two replicas on Ray Serve: the same request, sent to whichever is free, gets the same text.

pip install '.[ray]' openai    # in specdec's clone
"""

from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from ray import serve

from specdec.replicas import app

OPTIONS = {"model": "mini", "drafter": "ngram", "k": 4, "max_len": 512, "cpus": 0.5}


def main(replicas: int = 2, requests: int = 8) -> None:
    serve.run(app(OPTIONS | {"replicas": replicas}))
    with OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:

        def ask(_: int) -> str:
            reply = client.completions.create(
                model="mini", prompt="class Stack:\n", max_tokens=32, temperature=0.8, seed=7
            )
            return reply.choices[0].text

        with ThreadPoolExecutor(requests) as pool:
            texts = set(pool.map(ask, range(requests)))
    print(f"{requests} answers of {replicas} replicas")
    print("equal" if len(texts) == 1 else "DIFFERENT")
    serve.shutdown()


if __name__ == "__main__":
    main()
