"""Test the conversion of the chat page's conversations to prompts and from files, in node."""

import json
from pathlib import Path

import lmx_lab
from tests.support.programs import needs_node, node

pytestmark = needs_node
SCRIPT = Path(lmx_lab.__file__).parent / "server" / "pages" / "page_file.js"
STUBS = """
const newId = () => "id", titleOf = () => "title", SAMPLING = [["temperature"]];
const newChat = () => ({ system: "", sampling: {}, messages: [] });
"""


def text(value):
    return {"type": "text", "text": value}


def message(role, content):
    return {"role": role, "content": content}


def prompts(folder, *files):
    """Return the messages that the page sends for the conversation of each file."""
    script = "const files = %s; console.log(JSON.stringify(files.map((file) => toChatMessages(fromFile(file)[0]))))"
    source = STUBS + SCRIPT.read_text(encoding="utf-8") + script % json.dumps([json.dumps(file) for file in files])
    path = folder / "script.js"
    path.write_text(source, encoding="utf-8")
    found = json.loads(node(str(path)))
    return found


def test_system_messages_are_read_and_kept_in_their_place(tmp_path):
    question, answer = message("user", "Hi."), message("assistant", "Hello.")
    parts = message("system", [text("One. "), text("Two.")])
    prompt, later, last = message("system", "One. Two."), message("system", "Three."), message("user", "And?")
    assert prompts(
        tmp_path,
        [parts, later, question, answer],
        {"version": 1, "messages": [question, parts, answer, last, later]},
        {"messages": [prompt, question, later, last]},
    ) == [
        [prompt, later, question, answer],
        [question, prompt, answer, last, later],
        [prompt, later, last],
    ]


def test_a_long_conversation_is_sent_with_its_system_prompt(tmp_path):
    pairs = [message(role, f"{role} {at}") for at in range(2050) for role in ("user", "assistant")]
    prompt = message("system", "Be brief.")
    assert prompts(tmp_path, [prompt, *pairs], pairs) == [[prompt, *pairs[-3999:]], pairs[-4000:]]
