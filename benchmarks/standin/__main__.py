"""Build one model folder and print its path: python -m benchmarks.standin --out DIR draft."""

import argparse
from pathlib import Path

from benchmarks.standin.build import ensure_draft
from benchmarks.standin.smollm2 import ensure_smollm2


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standin", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the model folders go")
    models = parser.add_subparsers(dest="model", required=True)
    models.add_parser("smollm2", help="SmolLM2-135M-Instruct itself, float32")
    draft = models.add_parser("draft", help="SmolLM2 without some layers")
    draft.add_argument("--drop", type=int, nargs="+", default=[14], metavar="LAYER")
    args = parser.parse_args()
    try:
        if args.model == "smollm2":
            folder = ensure_smollm2(args.out)
        else:
            folder = ensure_draft(args.out, args.drop)
    except (ValueError, FileExistsError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(folder)


if __name__ == "__main__":
    main()
