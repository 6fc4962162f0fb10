"""The one door through which folders and names of Hugging Face come in: configurations, tokenizers, models.

A folder may bring Python code of its own (`auto_map` in its JSON files). transformers asks on standard input whether to
run it unless told otherwise, and `yes |` says yes. Here it is told: code of strangers runs under
`model.trust_remote_code = true` only. A folder whose classes transformers has itself loads without its code.
"""

from __future__ import annotations

from typing import Any

from overcoat.extras import load_extra, reason


def load_pretrained(auto: str, what: str, name: str, trust_remote_code: bool, **options: Any) -> Any:
    """`transformers.<auto>.from_pretrained(name)`, which is `what`. ValueError: there is none, it is broken, or it
    needs code of its own without `trust_remote_code`."""
    transformers = load_extra("transformers", "hf", f"loading {what}")
    try:
        return getattr(transformers, auto).from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except RuntimeError as error:  # out of memory is for the caller
        if "out of memory" in str(error).lower():
            raise
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error
    except Exception as error:  # of any kind: the files of a folder are read by four libraries
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"cannot load {what} {name!r}: it needs Python code of its own (auto_map), which only "
                "model.trust_remote_code=true of overcoat train runs; read that code first"
            ) from error
        raise ValueError(f"cannot load {what} {name!r}: {reason(error)}") from error
