"""Overcoat: train large language models in FP8 with little memory and much speed (COAT, arXiv 2410.19313).

    overcoat.convert(model)                                   # FP8 layers, in place
    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)   # 8-bit moments

README.md shows the whole; docs/architecture.md says how data flows.
"""

from overcoat import memory
from overcoat.models.convert import Report, convert
from overcoat.models.scores import record_scores
from overcoat.optim.adamw import AdamW
from overcoat.optim.release import release_gradients
from overcoat.recipe import Recipe
from overcoat.version import VERSION

__version__ = VERSION

__all__ = ["AdamW", "Recipe", "Report", "convert", "memory", "record_scores", "release_gradients"]
