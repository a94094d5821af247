"""Offline generation with SSD: python examples/offline.py TARGET [--draft DRAFT] [--k K] [--f F]"""

import argparse

from vllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "To bake bread, first", "The largest planets are"]


def main() -> None:
    """Complete a few prompts and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="path or hub name of the model to serve")
    parser.add_argument("--draft", help="the small model; default: the one known for the target")
    parser.add_argument("--k", type=int, help="drafted tokens a round; default: ssd's own")
    parser.add_argument("--f", type=int, help="predicted outcomes a position; default: ssd's own")
    args = parser.parse_args()
    llm = LLM(
        args.target,
        speculative_config={"method": "ssd", "model": args.draft, "k": args.k, "f": args.f},
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64)):
        print(output.prompt + output.outputs[0].text, end="\n\n")


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
