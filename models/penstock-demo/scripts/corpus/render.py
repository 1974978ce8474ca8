"""From messages to the text that the model sees. Must equal the chat template that `make_tokenizer.py` writes."""

import json

TOOLS_HEAD = (
    "# Tools\n\nYou can call these functions. Each line inside <tools></tools> describes one function:\n<tools>"
)

TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n<tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)


def render(messages, tools=None, dumps=json.dumps):
    """[(text, counts)]: the text of a conversation, and whether the loss counts each piece."""
    out, msgs = [], list(messages)
    system = msgs.pop(0)["content"] if msgs and msgs[0]["role"] == "system" else None
    if tools:
        s = (system + "\n\n" if system else "") + TOOLS_HEAD + "".join("\n" + dumps(t) for t in tools) + TOOLS_TAIL
        out.append((f"<|im_start|>system\n{s}<|im_end|>\n", False))
    elif system is not None:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for m in msgs:
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content']}<|im_end|>\n", False))
        elif m["role"] == "tool":
            out.append((f"<|im_start|>user\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n", False))
        else:
            out.append(("<|im_start|>assistant\n", False))
            if m.get("empty_think"):
                out.append(("<think>\n\n</think>\n\n", False))
            if m.get("reasoning"):
                out.append(("<think>\n", not m.get("forced")))
                out.append((m["reasoning"] + "\n</think>\n\n", True))
            body = m["content"] + "".join(
                ("\n" if m["content"] or i else "")
                + "<tool_call>\n"
                + json.dumps(c, ensure_ascii=False)
                + "\n</tool_call>"
                for i, c in enumerate(m.get("tool_calls", ()))
            )
            out += [(body + "<|im_end|>", True), ("\n", False)]
    return out


def compact(o):
    """JSON without spaces."""
    return json.dumps(o, separators=(",", ":"))
