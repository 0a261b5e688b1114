"""Run small versions of the parts ``hostile`` and ``mutations``, and test that they detect problems."""

from dataclasses import replace

import pytest

from soak.hostile.attacked_server import AttackedServer
from soak.hostile.attacks import ATTACKS, loads
from soak.hostile.models import CONFIGS, TEMPLATES, VALID, write_hostile_models
from soak.hostile.senders import Answer
from soak.mutated_models import PARTS, MutatedModels
from soak.mutations import MutatedLoads
from soak.report import Soak
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def soak(tmp_path_factory, smollm2):
    folder = tmp_path_factory.mktemp("soak") / "tiny-long"
    write_tiny_llama(folder, smollm2.path, seed=0, context=8192)
    return Soak(folder=folder, quick=True, seed=3)


@pytest.fixture(scope="module")
def models(soak, tmp_path_factory):
    return write_hostile_models(tmp_path_factory.mktemp("models"), soak)


@pytest.fixture(scope="module")
def target(soak, models, tmp_path_factory):
    with AttackedServer(soak, tmp_path_factory.mktemp("homes"), models, []) as target:
        yield target


def test_wrong_and_late_answers_and_failing_chats_are_detected(target, models):
    def unload(url):
        target._http.post("/admin/models/unload").raise_for_status()
        return [Answer(text="500 internal-error", seconds=6.0)]

    row = target.run("unload", [replace(ATTACKS[0], name="unload", send=unload)], VALID)
    problems = " ".join(row.wrong)
    assert "500 internal-error, not one of 400" in problems
    assert "later than 5 s" in problems
    assert "chats of another client fail: 503 no-model-loaded" in problems


def test_every_hostile_model_is_loaded_by_an_attack(models):
    names = {attack.name.removeprefix("a load: ").removesuffix(", GGUF") for attack in loads(models)[:-1]}
    assert names == {*CONFIGS, *TEMPLATES}


def test_changed_models_are_refused_or_loaded_and_the_server_stays_usable(soak, tmp_path):
    rows = MutatedLoads(soak, tmp_path).run(range(len(PARTS)))
    assert [row for row in rows if not row.passed] == []
    assert rows[-1].faults == len(PARTS)
    assert len(rows) > len(PARTS) // 2


def test_the_same_seed_and_number_write_the_same_model(soak, tmp_path):
    written = []
    for name in "ab":
        (tmp_path / name).mkdir()
        models = MutatedModels(tmp_path / name, soak)
        part, path = models.write(0)
        written.append((part.name, (path / part.file).read_bytes()))
        assert written[-1][1] != (models.valid / part.file).read_bytes()
    assert written[0] == written[1]
