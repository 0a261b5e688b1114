"""Trace a tiny model through a lab, in this process and over HTTP."""

import asyncio
import re

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import lmx_lab
from lmx_lab.errors import InvalidRequestError, NotLoadedError
from lmx_lab.values.tracing import Trace
from tests.support.labs import forbid_waits_on_loops
from tests.support.waiting import interrupt

pytestmark = pytest.mark.slow
TEXT = "The sea is wide and blue"
OTHER = "The sky is wide and blue"


@pytest.fixture(scope="module")
def attached(lab):
    with lmx_lab.attach(lab.url) as attached:
        yield attached


def test_a_trace_is_the_same_here_and_over_http(lab, attached, tmp_path):
    hooks = ["blocks.*.hook_resid_post", "*.hook_pattern", "logits"]
    here = lab.trace(TEXT, hooks, positions=[-1, 2])
    there = attached.trace(TEXT, hooks, positions=[-1, 2])
    assert list(here) == list(there)
    assert (here.positions, here.tokens, "".join(here.texts)) == (there.positions, there.tokens, TEXT)
    for name, values in here.items():
        np.testing.assert_allclose(values, there[name], atol=1e-4)
    stored = load_file(here.to_safetensors(tmp_path / "cache.safetensors"))
    np.testing.assert_array_equal(stored["logits"], here["logits"])
    assert "2 of 6 positions" in repr(here)
    assert "blocks.*.hook_resid_post (2 blocks)" in repr(here)
    assert "<code>logits</code>" in here._repr_html_()
    shapes = attached.hooks()
    assert shapes["blocks.0.attn.hook_pattern"] == ("position", 2, "key")
    assert "hooks of" in repr(shapes)
    assert "<table>" in shapes._repr_html_()
    assert len(shapes) > len(list(here))


def test_answers_and_conversations_are_traced_with_their_tokens(lab, attached):
    reply = lab.chat("hello", max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    tokens = (*reply.prompt_ids, *reply.ids)
    traced = reply.trace("logits", positions=range(-5, -1))
    assert traced.tokens == lab.trace(lab.requests[-1], "logits", positions=-1).tokens == tokens
    logits = traced["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, token in enumerate(reply.logprobs):
        assert logprobs[row, token.token] == pytest.approx(token.logprob, abs=1e-3)
    messages = [{"role": "user", "content": "hello"}]
    assert (
        lab.trace(messages, "hook_embed").tokens == attached.trace(list(tokens), "hook_embed").tokens[: -len(reply.ids)]
    )
    with pytest.raises(InvalidRequestError, match="token ids of this answer are not known"):
        lab.trace(attached.chat("hello", max_tokens=1), "logits")
    with pytest.raises(InvalidRequestError, match="use the lab that recorded the answer"):
        attached.trace(lab.requests[-1], "logits")


def test_the_logit_lens_ends_with_the_prediction_of_the_model(lab):
    lens = lab.logit_lens(TEXT, top=2)
    logits = lab.trace(TEXT, "logits")["logits"]
    assert lens.ids.shape == (2, 6, 2)
    assert list(lens.ids[-1, :, 0]) == list(logits.argmax(axis=1))
    assert np.exp(lens.logprobs[-1, 3, 0]) == pytest.approx(np.exp(logits[3]).max() / np.exp(logits[3]).sum(), rel=1e-3)
    frame = lens.df
    assert len(frame) == 2 * 6 * 2
    row = frame[(frame.block == 1) & (frame.position == 5) & (frame["rank"] == 1)].iloc[0]
    assert (row.token, row.predicted, row.id) == (" blue", lens.predicted(-1, 5)[0], logits[5].argmax())
    assert "LogitLensTable" in repr(lens)
    assert lens._repr_html_().count("<rect") == 2 * 6 + 1
    assert "The last 16 positions are shown" in lab.logit_lens("a " * 20)._repr_html_()


def test_attention_is_shown_for_all_heads(lab):
    attention = lab.attention(TEXT, 1, head=1)
    assert attention.pattern.shape == (2, 6, 6)
    np.testing.assert_allclose(attention.pattern.sum(axis=2), 1, atol=1e-5)
    assert not np.triu(attention.pattern[0], 1).any()
    shown = attention._repr_html_()
    assert "Block 1, head 1" in shown
    assert "attends to" in shown
    assert "2 heads" in repr(attention)
    for arguments, message in (
        ((5,), "has no hook"),
        ((-3,), "has no hook 'blocks.-3.attn.hook_pattern'; it has blocks.0"),
        ((1, 2), "has 2 heads"),
        ((1, -3), "head is -3; block 1"),
        ((1.5,), "must be a whole number"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            lab.attention(TEXT, *arguments)


def test_patching_restores_what_differs(lab, attached):
    hooks = ["*.hook_resid_post", "*.hook_resid_pre", "*.hook_mlp_out"]
    sweep = lab.patch(OTHER, TEXT, answer=500, other=600, hooks=hooks)
    different = sweep.positions[1]
    restored = {name: sweep.restored[at] for at, name in enumerate(sweep.hooks)}
    assert restored["blocks.0.hook_resid_pre"][different] == pytest.approx(1, abs=1e-3)
    assert restored["blocks.1.hook_resid_post"][-1] == pytest.approx(1, abs=1e-3)
    assert restored["blocks.1.hook_resid_post"][:-1] == pytest.approx(0, abs=1e-3)
    assert restored["blocks.0.hook_mlp_out"][0] == pytest.approx(0, abs=1e-3)
    logits = lab.trace(OTHER, "logits", positions=-1)["logits"][0]
    assert sweep.clean == pytest.approx(logits[500] - logits[600], abs=1e-3)
    assert len(sweep.df) == 6 * 6
    assert sweep._repr_html_().count("<svg") == 3
    assert "36 of 36 values" in repr(sweep)
    some = attached.patch(OTHER, TEXT, answer=500, other=600, hooks=hooks, positions=[-1, 1, -1])
    assert some.positions == (5, 1, 5)
    np.testing.assert_allclose(some.restored, sweep.restored[:, [5, 1, 5]], atol=1e-3)
    for changes, message in (
        ({"positions": [0, 9]}, "positions contains 9"),
        ({"hooks": "logits"}, "cannot be patched"),
        ({"answer": " two words"}, "answer has ' two words'"),
        ({"hooks": 5}, "hooks is 5"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            lab.patch(OTHER, TEXT, **{"answer": 500, "other": 600, **changes})


def test_the_progress_of_a_sweep_ends_with_all_values(lab, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich then takes standard error for a terminal.
    lab.patch(OTHER, TEXT, answer=500, other=600)
    assert re.findall(r"\d+/\d+", capsys.readouterr().err)[-1] == "12/12"


def test_single_heads_are_patched_at_each_position_or_at_all_together(lab, attached):
    tokens = {"answer": 500, "other": 600}
    sweep = lab.patch(OTHER, TEXT, hooks=["*.hook_z", "*.hook_resid_mid"], **tokens)
    assert sweep.hooks[:3] == ("blocks.0.attn.hook_z",) * 2 + ("blocks.0.hook_resid_mid",)
    assert sweep.heads == (0, 1, None) * 2
    assert sweep.restored.shape == (6, 6)
    assert sweep.restored[:, 0] == pytest.approx(0, abs=1e-3)  # The first token is the same in both texts.
    frame = sweep.df
    assert list(frame["head"].isna()) == [False] * 12 + [True] * 6 + [False] * 12 + [True] * 6
    assert {str(frame[name].dtype) for name in ("head", "position")} == {"Int64"}
    assert (str(frame["answer"].dtype), frame["answer"][0]) == ("float32", sweep.logits[0, 0, 0])
    heads = sweep.heat_map("hook_z", position=1)
    assert (heads.rows, heads.columns) == (["1", "0"], ["0", "1"])
    assert heads.values[1][1] == pytest.approx(sweep.restored[1, 1])
    assert "hook_z, head 1, at" in heads.describe(0, 1)
    assert sweep._repr_html_().count("<svg") == 6 + 1
    with pytest.raises(InvalidRequestError, match=r"position is 9, .*\.positions"):
        sweep.heat_map("hook_z", position=9)
    together = attached.patch(OTHER, TEXT, hooks="*.hook_z", together=True, **tokens)
    assert (together.restored.shape, together.positions) == ((4, 1), tuple(range(6)))
    assert together.df["position"].isna().all()
    assert together.df.dtypes.to_dict() == frame.dtypes.to_dict()
    assert together._repr_html_().count("<svg") == 1
    assert "6 positions" in together._repr_html_()
    one = lab.patch(OTHER, TEXT, hooks="*.hook_z", positions=-1, together=True, **tokens)
    heads_only = [at for at, head in enumerate(sweep.heads) if head is not None]
    np.testing.assert_allclose(one.logits[:, 0], sweep.logits[heads_only, -1], atol=1e-4)
    with pytest.raises(InvalidRequestError, match="together"):
        lab.patch(OTHER, TEXT, together="all", **tokens)


@pytest.mark.anyio
async def test_answers_are_traced_and_scored_on_a_running_loop(lab, monkeypatch):
    reply = await lab.achat("hello", max_tokens=4, temperature=0)
    traced = await reply.atrace("logits", positions=-1)
    np.testing.assert_allclose(traced["logits"], (await lab.atrace(reply, "logits", positions=-1))["logits"], atol=1e-4)
    assert (await reply.alens()).source == "scoring"
    asked = await lab.achat("hello", max_tokens=4, temperature=0, logprobs=1)
    assert (await asked.alens(color="rank")).source == "answer"
    request = await asyncio.to_thread(lambda: lab.requests[-1])
    forbid_waits_on_loops(monkeypatch)
    recorded = await request.atrace("logits", positions=-1)
    np.testing.assert_array_equal(recorded["logits"], (await lab.atrace(request, "logits", positions=-1))["logits"])
    assert (await lab.alogit_lens(request, top=1)).tokens == recorded.tokens
    assert (await lab.aattention(request, 0)).tokens == recorded.tokens
    assert (await lab.adirect_logit_attribution(request, request.answer[0])).texts == recorded.texts
    tokens = {"answer": request.answer[0], "other": request.answer[0] + 1}
    assert (await lab.apatch(request, request, positions=-1, **tokens)).texts == recorded.texts
    with pytest.raises(InvalidRequestError, match="same mean activations"):
        await lab.asteering_vector([request], [request], 0)


def test_values_are_returned_in_the_order_of_the_requested_positions(lab, attached):
    whole = lab.trace(TEXT, ["logits", "blocks.0.attn.hook_pattern"])
    for place in (lab, attached):
        some = place.trace(TEXT, ["logits", "blocks.0.attn.hook_pattern"], positions=[-1, 0, np.int64(2), -1])
        assert some.positions == (5, 0, 2, 5)
        for name, values in some.items():
            np.testing.assert_allclose(values, whole[name][[5, 0, 2, 5]], atol=1e-4)
    lens, rows = lab.logit_lens(TEXT), lab.logit_lens(TEXT, positions=[-1, 0, -1])
    np.testing.assert_array_equal(rows.ids, lens.ids[:, [5, 0, 5]])
    assert rows.df.query("block == 1 and rank == 1")["token"].tolist() == [" blue", "The", " blue"]
    assert repr(rows.predicted(1, -1)[0]) in repr(rows)


def test_negative_blocks_and_heads_count_from_the_last_one(lab, attached):
    pattern = lab.attention(TEXT, -1, head=-1)
    assert (pattern.layer, pattern.head) == (1, 1)
    assert pattern.heat_map(-2).title == lab.attention(TEXT, 1, 0).heat_map().title
    (name,) = attached.trace(TEXT, "blocks.-2.hook_resid_post", positions=0)
    assert name == "blocks.0.hook_resid_post"
    assert lab.steering_vector([TEXT], [OTHER], -1).layer == 1
    sweep = lab.patch(OTHER, TEXT, answer=500, other=600, hooks="blocks.-1.hook_mlp_out", positions=-1)
    assert sweep.hooks == ("blocks.1.hook_mlp_out",)


def test_integers_of_numpy_are_accepted_and_other_values_refused_by_name(lab):
    logits = lab.trace([np.int64(5), np.int64(6)], "logits", positions=np.arange(2))["logits"]
    assert lab.trace([5, 6], "logits", positions=np.int64(-1))["logits"].argmax() == logits[1].argmax()
    parts = lab.direct_logit_attribution([5, 6], logits[1].argmax(), other=7)
    assert f"{logits[1].argmax()} minus 7" in repr(parts)
    assert lab.attention([5, 6], np.int64(1)).layer == 1
    assert set(lab.trace([5, 6], np.array(["logits", "hook_embed"]))) == {"logits", "hook_embed"}
    for positions in (1.5, "last", True, [0, True], [], slice(2), {0: 1}):
        with pytest.raises(InvalidRequestError, match=r"positions is .* index, or a list"):
            lab.patch(OTHER, TEXT, answer=500, other=600, positions=positions)
    for token in ("", None, -1, 1.5, True):
        with pytest.raises(InvalidRequestError, match=r"token is .* the id of a token, or a text"):
            lab.direct_logit_attribution(TEXT, token)
    for hooks in ([], [""], [5], b"logits"):
        with pytest.raises(InvalidRequestError, match=r"hooks is .* a name or a list of names"):
            lab.trace(TEXT, hooks)
    with pytest.raises(InvalidRequestError, match="cannot be traced"):
        lab.trace(b"text", "logits")


def test_parts_of_results_that_do_not_exist_are_refused(lab):
    lens = lab.logit_lens(TEXT, positions=[2, -1])
    assert lens.predicted(-1, -1) == lens.predicted(1, 5)
    for place, message in (((2, 2), "block is 2; .* 0 to 1"), ((0, 3), r"position is 3, .*\.positions")):
        with pytest.raises(InvalidRequestError, match=message):
            lens.predicted(*place)
    with pytest.raises(InvalidRequestError, match="head is 2; block 0"):
        lab.attention(TEXT, 0).heat_map(2)
    same = lab.patch(TEXT, TEXT, answer=500, other=600, positions=0)
    assert np.isnan(same.restored).all()
    assert "nothing can be restored" in repr(same)
    assert "Nothing can be restored" in same._repr_html_()
    with pytest.raises(InvalidRequestError, match="hook is 'hook_mlp_out'; this sweep replaced hook_resid_post"):
        same.heat_map("hook_mlp_out")


def test_both_texts_of_a_sweep_need_the_model_of_their_answers(lab, tiny):
    reply = lab.chat("hello", max_tokens=2, ignore_eos=True)
    tokens = [*reply.prompt_ids, *reply.ids]
    lab.load(tiny.path.with_name("tiny-two"))
    for pair in ((reply, tokens), (tokens, reply)):
        with pytest.raises(NotLoadedError, match=r'generated by .*tiny on MLX, which is not loaded; .*engine="mlx"'):
            lab.patch(*pair, answer=500, other=600, positions=0)
    with pytest.raises(InvalidRequestError, match=r"clean is an answer of .*tiny and corrupt one of .*tiny-two, or"):
        lab.patch(reply, lab.chat("hello", max_tokens=2, ignore_eos=True), answer=500, other=600)
    lab.load(tiny.path)


def test_an_interrupted_sweep_keeps_its_cells(lab, monkeypatch):
    compute, calls = lab.backend.trace, []

    async def interrupted(body):
        calls.append(body)
        if len(calls) == 3:
            interrupt()
            await asyncio.sleep(60)
        return await compute(body)

    monkeypatch.setattr(lab.backend, "trace", interrupted)
    sweep = lab.patch(OTHER, TEXT, answer=500, other=600)
    assert sweep.interrupted
    assert sweep.df.attrs["interrupted"]
    done = np.isfinite(sweep.restored).all(axis=0)
    assert 2 <= done.sum() < 6
    assert "grey cells are missing" in sweep._repr_html_()


def test_contributions_add_up_to_the_logit(lab):
    parts = lab.direct_logit_attribution(TEXT, 500, other=600)
    logits = lab.trace(TEXT, "logits", positions=-1)["logits"][0]
    assert parts.logit == pytest.approx(logits[500] - logits[600], abs=1e-3)
    total = parts.embedding + parts.attention.sum() + parts.mlp.sum() + parts.bias
    assert total == pytest.approx(parts.logit, abs=1e-3)
    np.testing.assert_allclose(parts.heads.sum(axis=1), parts.attention, atol=1e-4)
    assert list(parts.df.part) == ["embedding", *["attention", "head", "head", "mlp"] * 2, "bias"]
    assert list(parts.df.block) == [pd.NA, *[0] * 4, *[1] * 4, pd.NA]
    assert {str(parts.df[name].dtype) for name in ("block", "head")} == {"Int64"}
    assert "head 1" in parts._repr_html_()
    assert "500 minus 600" in repr(parts)
    assert lab.direct_logit_attribution(TEXT, 500).logit == pytest.approx(logits[500], abs=1e-3)


def test_wrong_texts_and_engines_are_refused(lab, tmp_path):
    for what in (3, [], [1, "a"], None):
        with pytest.raises(InvalidRequestError, match="cannot be traced; pass a text"):
            lab.trace(what, "logits")
    with (
        lmx_lab.launch("echo", port=0, home=tmp_path) as echo,
        pytest.raises(InvalidRequestError, match='engine="mlx"'),
    ):
        echo.hooks()


def test_a_damaged_document_is_an_error():
    trace = Trace(model="m", tokens=(1,), texts=("a",), arrays={"x": np.zeros((1, 2), np.float32)}, details={})
    data = trace.encode()
    assert Trace.decode(data).arrays["x"].shape == (1, 2)
    for damaged in (b"", data[:20], data[:-4], data.replace(b"[1, 2]", b"[1, 3]"), data.replace(b"model", b"mudel")):
        with pytest.raises(ValueError, match=r"truncated|size of x|has no|Expecting|Unterminated"):
            Trace.decode(damaged)
