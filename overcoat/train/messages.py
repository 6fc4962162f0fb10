"""Convert conversations of rows to the form that chat templates read, and check them.

    messages      a list of {role, content}, or of {from, value} (ShareGPT, LLaVA); content: text, or a list of parts
    tool_calls    a list of {type, function: {name, arguments}}; `arguments` an object, or JSON text as OpenAI has it
    tools         a list of objects, as objects or as JSON text, each or all

An error names the field.
"""

from __future__ import annotations

from typing import Any

from overcoat.train.config import require
from overcoat.train.rows import as_data, as_text, kind_of, parsed

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
CALLS = ("tool_calls", "function_call")


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a checked list of messages, in the form that chat templates read. ValueError: `where` and what is
    wrong."""
    value = as_data(value, where)
    what = "an empty list" if value == [] else kind_of(value)
    require(isinstance(value, list) and bool(value), f"{where} holds {what}, not a list of messages: correct the row")
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    message = as_data(message, where)
    require(isinstance(message, dict), f"{where} holds {kind_of(message)}, not a message: correct or remove the row")
    given = {key: value for key, value in message.items() if value is not None}
    is_sharegpt = "from" in given or ("from" in message and "role" not in message)
    names = ("from", "value") if is_sharegpt else ("role", "content")
    calls = {key: _calls(given[key], key == CALLS[0], f"{where}.{key}") for key in CALLS if given.get(key)}
    if missing := [name for name in (names[:1] if calls else names) if name not in message]:
        among = " among " + ", ".join(map(str, message)) if message else ""
        raise ValueError(f"{where} has no field {missing[0]!r}{among}: rename one, or correct the row")
    role, content = as_text(given.get(names[0]), f"{where}.{names[0]}").strip().lower(), given.get(names[1])
    if is_sharegpt:
        both = [key for key in ("role", "content") if key in given]
        require(not both, f"{where} has {' and '.join(both)} beside from and value: remove one pair")
        given = {key: value for key, value in given.items() if key not in names}
    given |= {"role": ROLES.get(role, role), **calls}
    if isinstance(content, list):
        content = [_part(part, f"{where}.{names[1]}[{number}]") for number, part in enumerate(content)]
    elif content is not None or not calls:
        as_text(content, f"{where}.{names[1]}")
    return given if content is None else {**given, "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    require(isinstance(part, dict), f"{where} holds no object with a type: correct or remove the row")
    if as_text(part.get("type"), f"{where}.type") == "text" or part.get("text") is not None:
        as_text(part.get("text"), f"{where}.text")
    return {key: value for key, value in part.items() if value is not None}


def _calls(value: Any, is_list: bool, where: str) -> Any:
    """Return tool calls, or a single one, with their arguments as objects."""
    if not is_list:
        return _call(value, where)
    require(isinstance(value, list), f"{where} holds {kind_of(value)}, not a list of calls: correct the row")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    for place, each in ((where, call), (f"{where}.function", function_of(call))):
        require(isinstance(each, dict), f"{place} holds {kind_of(each)}, not an object: correct the row")
    function = function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        place = f"{where}.function.arguments"
        arguments = parsed(arguments, place) if arguments.strip() else {}  # of a call without any
        require(isinstance(arguments, dict), f"{place} holds {kind_of(arguments)}, not an object: correct the row")
        return with_function(call, {**function, "arguments": arguments})
    return call


def function_of(call: Any) -> Any:
    """Return the name and arguments of a call, or the description of a tool; both may be nested in "function"."""
    return call["function"] if isinstance(call, dict) and "function" in call else call


def with_function(call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    """Return a call or tool with its function replaced, nested as before."""
    return {**call, "function": function} if "function" in call else function


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of tools; [] for null, "" and "null"."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return []
    tools = as_data(value, where)
    require(isinstance(tools, list), f"{where} holds {kind_of(tools)}, not a list: correct the row")
    return [_tool(tool, f"{where}[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    tool = as_data(tool, where)
    function = function_of(tool)
    is_object = isinstance(tool, dict) and isinstance(function, dict)
    require(is_object, f"{where} is no object: correct or remove it")
    parameters = {key: as_data(value, f"{where}.{key}") for key, value in function.items() if key == "parameters"}
    return with_function(tool, {**function, **parameters})


def with_system(messages: list[dict[str, Any]], value: Any, where: str) -> list[dict[str, Any]]:
    """Return `messages` with the system prompt of the row's field in front. ValueError: the first message is another
    system prompt."""
    if value is None or not as_text(value, where).strip():
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": value}, *messages]
    is_same = text_of_message(messages[0]).strip() == value.strip()
    require(is_same, f"{where} and the first message are two different system prompts: remove one")
    return messages


def text_of_message(message: dict[str, Any]) -> str:
    """Return the text of a message; the texts of its parts are joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
