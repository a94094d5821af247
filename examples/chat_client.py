"""A chat with a server that speculates. Start one:

    vllm serve TARGET --speculative-config '{"method":"ssd","k":7,"f":3}'

and then this: python examples/chat_client.py "Why is the sky blue?". To a client, a server with
SSD is like any other: the same API, the same text, sooner.
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Ask one question and print the answer as it comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's address")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")  # vLLM asks for a key only if told to
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
