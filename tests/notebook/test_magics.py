"""Test the magics in a shell without a kernel."""

import atexit

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import lmx_lab
from lmx_lab.notebook.magics import OffloadTransformer, QuestionTransformer, compile_cell
from tests.support.labs import manager_of


@pytest.fixture(scope="module")
def terminal(tmp_path_factory):
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    yield shell
    # Here, not at exit, because this restores ``__main__``.
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(terminal):
    lmx_lab.load_ipython_extension(terminal)
    terminal.autoawait = True
    yield terminal
    lmx_lab.unload_ipython_extension(terminal)


@pytest.fixture
def lab(tmp_path):
    with lmx_lab.launch("echo", home=tmp_path, port=0) as lab:
        yield lab


@pytest.fixture
def tiny_lab(tiny_home):
    with lmx_lab.launch("tiny", home=tiny_home, port=0) as lab:
        yield lab


def test_loading_the_extension_twice_and_unloading_it_twice_is_harmless(shell):
    for _ in range(2):
        lmx_lab.load_ipython_extension(shell)
    assert [type(each) for each in shell.input_transformers_post].count(OffloadTransformer) == 1
    assert all((shell.find_cell_magic("offload"), shell.find_line_magic("lmx"), shell.find_cell_magic("lmx")))
    for _ in range(2):
        lmx_lab.unload_ipython_extension(shell)
    assert shell.input_transformers_post == []
    assert not [each for each in shell.input_transformers_cleanup if isinstance(each, QuestionTransformer)]
    assert not any((shell.find_cell_magic("offload"), shell.find_line_magic("lmx"), shell.find_cell_magic("lmx")))
    assert not shell.transform_cell("%%offload\n1").startswith("await")


@pytest.mark.parametrize(
    ("cell", "is_offloaded"),
    [
        *((cell, True) for cell in ("%%offload\nx = 1", "\n\n%%offload\nx = 1\n", "%%offload  \n'a'\n\"b\"\n")),
        *((cell, False) for cell in ("x = 1", "%%time\nx = 1", "'%%offload'", "get_ipython().magic", "")),
        ("# %%offload\n1", False),
    ],
)
def test_only_an_offloaded_cell_is_awaited(shell, cell, is_offloaded):
    transformed = shell.transform_cell(cell)
    assert transformed.startswith("await ") == ("await" in transformed) == is_offloaded
    assert shell.should_run_async(cell, transformed_cell=transformed) == is_offloaded


def test_a_question_mark_after_ask_does_not_request_help(shell):
    assert "'ask Who\\'s \"there\"?'" in shell.transform_cell('x = 1\n%lmx ask Who\'s "there"?\n')
    assert "%lmx ask why?" in shell.transform_cell("%%writefile notes\n%lmx ask why?\n")
    for request in ("%lmx?", "%%lmx?", "ask?"):
        assert "pinfo" in shell.transform_cell(request)


TRIPLES = ("'" * 3, '"' * 3)


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("before", ["    ", "if x:\n    ", "reply = ", "'T'  # it's T\n", "!echo T\n", "TaT; TbT\n"])
def test_ask_may_be_at_any_statement(shell, before, triple):
    quote = '"' if triple[0] == "'" else "'"
    before = before.replace("'T'", f"{quote}{triple}{quote}").replace("T", triple)
    assert "run_line_magic('lmx', 'ask why?')" in shell.transform_cell(f"{before}%lmx ask why?\n")
    both = shell.transform_cell(f"%lmx ask what is {triple} for?\n{before.lstrip(' ')}%lmx ask why?\n")
    assert both.count("run_line_magic('lmx', ") == 2
    assert "pinfo" not in both


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("text", ["T\n%lmx ask why?\nT", "x = rT\\T\n    %lmx ask why?\nT", "T\n!\n%lmx ask why?\n!T"])
def test_a_question_in_a_multiline_string_is_unchanged(shell, text, triple):
    text = text.replace("T", triple)
    transformed = shell.transform_cell(f"{text}\n%lmx ask why not?\n")
    assert transformed.startswith(text)
    assert transformed.endswith("run_line_magic('lmx', 'ask why not?')\n")


def test_the_error_says_where_the_magic_can_be_awaited(shell):
    with pytest.raises(UsageError, match="first line of its cell"):
        shell.run_cell_magic("offload", "", "1")
    shell.autoawait = False
    assert not shell.transform_cell("%%offload\n1").startswith("await")
    assert "first line of its cell" in str(shell.run_cell("%%offload\n1").error_in_exec)


def test_an_offloaded_cell_runs_in_a_terminal_too(shell):
    done = shell.run_cell("%%offload\nimport threading\nname = threading.current_thread().name\nname")
    assert done.success
    assert done.result == shell.user_ns["name"] == "lmx-lab-offload"


@pytest.mark.parametrize(
    ("cell", "value"), [("1 + 1", 2), ("1 + 1;", None), ("1 + 1  # ;", 2), ("x = 2", None), ("1\n2\n", 2), ("';'", ";")]
)
def test_the_last_expression_is_the_value_unless_a_semicolon_ends_it(shell, cell, value):
    assert compile_cell(shell, cell).run(shell) == value


@pytest.mark.parametrize("cell", ["await f()", "x = 1\nasync with f(): pass", "[x async for x in f()]"])
def test_awaiting_in_an_offloaded_cell_is_refused_with_the_reason(shell, cell):
    with pytest.raises(UsageError, match="Remove either the await or the %%offload"):
        compile_cell(shell, cell)
    with pytest.raises(SyntaxError):
        compile_cell(shell, "x = = 1")
    assert compile_cell(shell, "async def f():\n    await g()").value is None


@pytest.mark.parametrize("line", ["lod tiny", "load", "launch --port x", "launch --loop fast", "load 'x", "models now"])
def test_invalid_arguments_are_a_usage_error(shell, line):
    with pytest.raises(UsageError, match=r"%lmx\? shows"):
        shell.run_line_magic("lmx", line)


@pytest.mark.parametrize("line", ["load tiny", "unload", "models", "panel", "stop", "ask why?"])
def test_without_a_lab_the_next_step_is_named(shell, line, capsys):
    with pytest.raises(UsageError, match="%lmx launch MODEL"):
        shell.run_line_magic("lmx", line)
    assert shell.run_line_magic("lmx", "") is None
    assert "%lmx launch" in capsys.readouterr().out


def test_the_magic_has_the_verbs_of_the_lab(shell, tiny_lab, capsys):
    assert shell.run_line_magic("lmx", "") is tiny_lab
    assert shell.run_line_magic("lmx", "load tiny-two").model == "tiny-two"
    assert [model.id for model in shell.run_line_magic("lmx", "models") if model.loaded] == ["tiny-two"]
    shell.run_line_magic("lmx", "unload")
    assert " freed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no-such-model"):
        shell.run_line_magic("lmx", "load no-such-model")
    with pytest.raises(UsageError, match="load"):
        shell.run_line_magic("lmx", "ask hi")
    shell.run_line_magic("lmx", "stop")
    assert not tiny_lab.running


def test_launch_has_options(shell, tiny_lab, monkeypatch):
    monkeypatch.setenv("LMX_LAB_HOME", str(tiny_lab.settings.home))
    other = shell.run_line_magic("lmx", "launch tiny-two --loop thread --port 0 --lan")
    assert other is lmx_lab.current()
    host, model = other.settings.host, manager_of(other).snapshot.model
    assert (other.server.mode, host, model) == ("thread", "0.0.0.0", "tiny-two")


@pytest.fixture
def prompts(lab, monkeypatch):
    """The messages of each request; the model answers them."""
    requests = []
    generate = lab.backend.generate

    async def record(request, *, batch=False):
        requests.append([(message.role, message.content) for message in request.messages])
        return await generate(request)

    monkeypatch.setattr(lab.backend, "generate", record)
    return requests


def test_a_cell_is_a_prompt_with_the_values_of_its_expressions(shell, prompts, capsys):
    shell.user_ns.update(town="Paris", numbers=[1, 2])
    reply = shell.run_cell_magic(
        "lmx", "--max-tokens 2 --temperature 0 --system 'Be brief.'", "Is $town {sum(numbers)}?\n"
    )
    assert isinstance(reply, lmx_lab.Reply)
    assert reply.usage.completion_tokens == 2
    shell.run_cell_magic("lmx", "--max-tokens 1 --raw", "Is $town {sum(numbers)}?")
    assert capsys.readouterr().err == ""
    shell.run_cell_magic("lmx", "--max-tokens 1", 'Is {"a": [town]} {unknown} valid?')
    assert capsys.readouterr().err.startswith("%%lmx: no value was inserted (")
    assert [(role, content.strip()) for messages in prompts for role, content in messages if content] == [
        ("system", "Be brief."),
        ("user", "Is Paris 3?"),
        ("user", "Is $town {sum(numbers)}?"),
        ("user", 'Is {"a": [town]} {unknown} valid?'),
    ]


def test_ask_accepts_apostrophes_and_the_options_of_a_cell_are_checked(shell, prompts):
    shell.user_ns["town"] = "Paris"
    shell.run_line_magic("lmx", 'ask What\'s $town --like, "really"?')
    assert prompts == [[("user", 'What\'s Paris --like, "really"?')]]
    for options, words in (("--max-tokens x", "int"), ("--temperature 9", "temperature"), ("--seed 1", "unrecognized")):
        with pytest.raises(UsageError, match=words):
            shell.run_cell_magic("lmx", options, "hi")
    with pytest.raises(UsageError, match="no text"):
        shell.run_cell_magic("lmx", "", "  \n")
    assert len(prompts) == 1


def test_a_cell_is_a_template_for_the_rows_of_a_data_frame(shell, lab):
    import pandas as pd

    frame = pd.DataFrame({"text": ["a", "b"], "n": [1, 2]}, index=["x", "x"])
    shell.user_ns.update(frame=frame, rows=["a"], n="not a column")
    answers = shell.run_cell_magic("lmx", "--map frame --column text --into summary --max-tokens 50", "Say $n {n}:\n")
    assert answers["answer"].tolist() == frame["summary"].tolist() == ["Say $n 1:\n\na", "Say $n 2:\n\nb"]
    assert shell.run_cell_magic("lmx", "--map rows", "<{text}>\n")["answer"].tolist() == ["<a>"]
    cache = lab.settings.home / "a.db"
    shell.run_cell_magic("lmx", f"--map frame --column text --into text --cache {cache}", "<{text}>")
    assert frame["text"].tolist() == ["<a>", "<b>"]
    assert cache.exists()
    for options, words in (
        ("--map missing", "no variable 'missing'"),
        ("--map rows --into x", "rows is a list; use a data frame"),
        ("--map frame --raw", "--raw"),
        ("--into x", "--into needs --map"),
        ("--map frame --column x", "columns are"),
    ):
        with pytest.raises(UsageError, match=words):
            shell.run_cell_magic("lmx", options, "hi")
