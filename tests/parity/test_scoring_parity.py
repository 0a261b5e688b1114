"""Compare 200 questions with ten choices, scored on both engines, with transformers on PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not in this environment; make parity has one with it")

import transformers  # noqa: E402

import lmx_lab  # noqa: E402
from lmx_lab.evals import Choice  # noqa: E402
from tests.parity.reference import load_both  # noqa: E402
from tests.support.gguf import starter_gguf  # noqa: E402

CHOICES = 10
BATCH = 40
LARGEST_MEAN_DIFFERENCE = {"mlx": 0.1, "llama.cpp": 0.2}
"""Mean difference of the log-probabilities of choices. llama.cpp quantizes activations, and MLX computes in float32."""
# Short beginnings, so that the model is wrong about half of the time.
TABLES = {
    "{}": (
        "France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Russia Moscow, Greece Athens, Austria "
        "Vienna, Portugal Lisbon, Poland Warsaw, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, "
        "Ireland Dublin, Hungary Budapest, Turkey Ankara, Iran Tehran, Iraq Baghdad, Thailand Bangkok, Vietnam Hanoi, "
        "Cuba Havana, Peru Lima, Chile Santiago, Kenya Nairobi, Ghana Accra, Germany Berlin, Belgium Brussels, China "
        "Beijing, Canada Ottawa, Australia Canberra, Morocco Rabat, Algeria Algiers, Libya Tripoli, Sudan Khartoum, "
        "Somalia Mogadishu, Uganda Kampala, Senegal Dakar, Syria Damascus, Lebanon Beirut"
    ),
    "{} and": (
        "hot cold, big small, fast slow, high low, young old, rich poor, early late, hard soft, light dark, dry wet, "
        "full empty, happy sad, open closed, strong weak, thick thin, wide narrow, clean dirty, cheap expensive, deep "
        "shallow, loud quiet, near far, right wrong, safe dangerous, sharp dull, simple complex, sweet bitter, true "
        "false, tall short, up down, war peace, win lose, buy sell, push pull, love hate, life death, day night, "
        "first last, inside outside, always never, before after"
    ),
    "With {} comes": (
        "go went, see saw, eat ate, run ran, take took, give gave, come came, know knew, think thought, buy bought, "
        "bring brought, catch caught, teach taught, sing sang, drink drank, swim swam, begin began, write wrote, "
        "drive drove, ride rode, rise rose, speak spoke, break broke, choose chose, steal stole, freeze froze, fly "
        "flew, grow grew, throw threw, draw drew, fall fell, feel felt, keep kept, sleep slept, leave left, lose "
        "lost, find found, hold held, stand stood, tell told"
    ),
    "{} or": (
        "mouse mice, foot feet, tooth teeth, man men, woman women, child children, goose geese, ox oxen, knife "
        "knives, wife wives, leaf leaves, wolf wolves, half halves, shelf shelves, loaf loaves, thief thieves, city "
        "cities, baby babies, story stories, party parties, box boxes, bus buses, dish dishes, match matches, hero "
        "heroes, potato potatoes, cat cats, book books, tree trees, house houses, car cars, river rivers, cloud "
        "clouds, stone stones, king kings, ship ships, road roads, word words, hand hands, door doors"
    ),
    "A {} has": (
        "dog bark, lion roar, cat meow, bee honey, bird wings, fish fins, snake venom, elephant trunk, giraffe neck, "
        "zebra stripes, leopard spots, turtle shell, kangaroo pouch, camel hump, rhino horn, deer antlers, horse "
        "hooves, peacock feathers, crab claws, spider web, tree trunk, rose thorns, book pages, clock hands, car "
        "engine, ship anchor, piano keys, guitar strings, shirt sleeves, shoe laces, house roof, castle towers, "
        "school teachers, hospital doctors, library books, kitchen stove, computer screen, camera lens, bicycle "
        "pedals, plane wings"
    ),
}


def questions() -> Iterator[dict[str, object]]:
    for prompt, table in TABLES.items():
        pairs = [entry.split() for entry in table.split(", ")]
        for number, (subject, answer) in enumerate(pairs):
            others = dict.fromkeys(pairs[(number + step) % len(pairs)][1] for step in range(1, len(pairs)))
            wrong = [f" {other}" for other in others if other != answer][: CHOICES - 1]
            # The place of the right choice must not matter, so it changes.
            at = number % CHOICES
            yield {
                "prompt": prompt.format(subject),
                "options": [*wrong[:at], f" {answer}", *wrong[at:]],
                "right": f" {answer}",
            }


@pytest.fixture(scope="module")
def expected(smollm2):
    """The log-probability of each choice of each question, computed by transformers with the weights of the file."""
    _, model = load_both(smollm2.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.path)
    texts = [(row["prompt"], option) for row in questions() for option in row["options"]]
    scores = []
    for start in range(0, len(texts), BATCH):
        batch = [
            (tokenizer.encode(prompt), tokenizer.encode(prompt + option))
            for prompt, option in texts[start : start + BATCH]
        ]
        longest = max(len(whole) for _, whole in batch)
        tokens = torch.tensor([[*whole, *[0] * (longest - len(whole))] for _, whole in batch])
        with torch.no_grad():
            # Padding on the right does not change the tokens before it.
            logprobs = model(tokens).logits.float().log_softmax(-1)
        for row, (prompt, whole) in enumerate(batch):
            assert whole[: len(prompt)] == prompt
            scores.append(sum(float(logprobs[row, at - 1, whole[at]]) for at in range(len(prompt), len(whole))))
    return [scores[start : start + CHOICES] for start in range(0, len(scores), CHOICES)]


# Two minutes on two cores, as long as the reference.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["mlx", "llama.cpp"])
def test_the_number_of_right_answers_of_200_is_that_of_transformers(engine, smollm2, starter_home, expected):
    rows = list(questions())
    path = smollm2.path if engine == "mlx" else starter_gguf(starter_home)
    right = sum(
        row["options"][scores.index(max(scores))] == row["right"] for row, scores in zip(rows, expected, strict=True)
    )
    with lmx_lab.launch(str(path), engine=engine, port=0, loop="thread") as lab:
        ours = lab.evaluate(
            rows, "{prompt}", answer="right", metric=Choice("options", chat_template=False), store=False
        )
    assert len(rows) == 200
    assert 60 <= right <= 140, "the questions are too easy or too hard to compare engines"
    assert abs(ours.score.mean * len(rows) - right) <= 1
    pairs = [
        (one, other)
        for row, scores in zip(ours.rows, expected, strict=True)
        for one, other in zip(row.logprobs, scores, strict=True)
    ]
    assert sum(abs(one - other) for one, other in pairs) / len(pairs) < LARGEST_MEAN_DIFFERENCE[engine]
