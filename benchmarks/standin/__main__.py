"""Build one model folder and print its path: python -m benchmarks.standin --out DIR target."""

import argparse
from pathlib import Path

from benchmarks.standin.build import DTYPES, ensure_draft, ensure_standin, ensure_target
from benchmarks.standin.shapes import SHAPES
from benchmarks.standin.smollm2 import ensure_smollm2


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standin", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the model folders go")
    models = parser.add_subparsers(dest="model", required=True)
    models.add_parser("smollm2", help="SmolLM2-135M-Instruct itself, float32")
    target = models.add_parser("target", help="the same function at a large model's cost")
    target.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    target.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    draft = models.add_parser("draft", help="SmolLM2 without some layers")
    draft.add_argument("--drop", type=int, nargs="+", default=[14], metavar="LAYER")
    standin = models.add_parser("standin", help='any shape without weights: load format "standin"')
    standin.add_argument("--shape", required=True, help="a target's, or six sizes with commas")
    standin.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    standin.add_argument("--drop", type=int, nargs="+", default=[], metavar="LAYER")
    args = parser.parse_args()
    try:
        if args.model == "smollm2":
            folder = ensure_smollm2(args.out)
        elif args.model == "target":
            folder = ensure_target(args.out, args.shape, args.dtype)
        elif args.model == "standin":
            folder = ensure_standin(args.out, args.shape, args.dtype, args.drop)
        else:
            folder = ensure_draft(args.out, args.drop)
    except (ValueError, FileExistsError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(folder)


if __name__ == "__main__":
    main()
