"""Images of conversations: find those that a row names, place them among its texts, and read their pixels.

With `data.images` a row names its images where they stand: in a message's parts ({"type": "image", "image": PATH}), or
in its field "images" (or "image"), in the order of the parts without a path, or of `<image>` in the texts (as LLaVA's
data have it). Paths are relative to `data.images`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overcoat.extras import load_extra
from overcoat.train.config import error_context, require

MARK = "<image>"


def named_images(found: dict[str, Any], row: Any) -> str:
    """Return which part of a row names images, for a message: a field, or a part of its messages; "" if there is
    none."""
    for key in ("images", "image"):
        value = row.get(key)
        if any(value) if isinstance(value, list) else value:
            return repr(key)
    return next((f"a part of type {kind!r}" for kind in part_types(found) if "image" in kind), "")


def part_types(found: dict[str, Any]) -> Iterator[str]:
    """Yield the types of the messages' parts."""
    contents = [message.get("content") for said in found.values() if isinstance(said, list) for message in said]
    yield from (part["type"] for content in contents if isinstance(content, list) for part in content)


def place_images(messages: list[dict[str, Any]], row: Any, where: str) -> list[str]:
    """Make the contents of `messages` lists of parts, in place, each image part with its path; return the paths in
    order. ValueError: images and image parts do not match."""
    given = row.get("images") or row.get("image") or []
    waiting = list(given) if isinstance(given, list) else [given]
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts = [text.strip() for text in content.split(MARK)]
            parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
            message["content"] = [part for part in parts if part.get("text", True)] or [{"type": "text", "text": ""}]
    parts = [part for message in messages for part in message.get("content") or [] if part["type"] != "text"]
    users = [message for message in messages if message["role"] == "user"]
    if waiting and not parts and users:  # as TRL does: before the first question
        parts = [{"type": "image"} for _ in waiting]
        users[0]["content"] = [*parts, *users[0]["content"]]
    paths = []
    for part in parts:
        require(part["type"] == "image", f"{where}: a part of type {part['type']!r}: images and text are supported")
        own = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
        require(own is not None or bool(waiting), f"{where}: more image parts than images: correct the row")
        path = waiting.pop(0) if own is None else own
        if isinstance(path, dict) and not path.get("bytes"):  # of the Image feature of `datasets`
            path = path.get("path")
        require(isinstance(path, str), f"{where}: an image is a {type(path).__name__}, not a path: write it to a file")
        paths.append(path)
        part.clear()
        part |= {"type": "image", "image": path}
    require(not waiting, f"{where}: {len(waiting)} images more than image parts: correct the row")
    return paths


def read_image(path: Path) -> Any:
    """Return an RGB image (PIL), upright as its EXIF orientation says."""
    load_extra("PIL", "hf", "data.images")
    feature = load_extra("datasets", "hf", "data.images").Image(mode="RGB")
    with error_context(f"cannot read the image {path} (", Exception, "): repair it, or remove its row"):
        return feature.decode_example({"path": str(path), "bytes": None})
