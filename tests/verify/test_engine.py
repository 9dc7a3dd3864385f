"""The nano engine on the standard path: modes agree, requests do not see each other, resources come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3_backend.geometry import geometry
from k3_backend.model import standard
from k3_backend.model.batch import Batch
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from verify.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from verify.engine.drafting import draft
from verify.engine.pool import Pool
from verify.engine.sampling import choose, gumbel_noise

PICO = geometry("k3-pico")
CLOSE_NATS = 0.25
"""Per token and request: rounding between batch shapes, which now and then tips an expert choice of the untrained model
(measured up to 0.12); another request's text or state differs by more than a nat."""


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return ModelWeights.seeded(PICO, 7)


def engine(
    weights: ModelWeights, *, drafts: int = 0, requests: int = 6, step_tokens: int = 256, pages: int = 60
) -> Engine:
    state = DecodeState.allocate(PICO, slots=requests * (1 + drafts) + 1, pages=pages, page_size=16, taps=drafts + 3)
    config = EngineConfig(max_requests=requests, max_step_tokens=step_tokens, drafts=drafts)
    return Engine(
        config,
        state,
        lambda batch: standard.forward(weights, state, batch),
        lambda hidden: standard.logits(weights, hidden),
    )


def asks(count: int = 5, forced: int = 6) -> list[Request]:
    rng = torch.Generator().manual_seed(3)

    def text(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (n,), generator=rng).tolist())

    return [
        Request(id=f"r{i}", prompt=text(9 + 7 * i), params=SamplingParams(max_tokens=forced), forced=text(forced))
        for i in range(count)
    ]


def difference(one: dict[str, Completion], other: dict[str, Completion]) -> float:
    assert one.keys() == other.keys()
    sums = {k: sum(abs(a - b) for a, b in zip(one[k].logprobs, other[k].logprobs, strict=True)) for k in one}
    return max(total / len(one[k].logprobs) for k, total in sums.items())


@pytest.fixture(scope="module")
def plain(weights: ModelWeights) -> dict[str, Completion]:
    with torch.inference_mode():
        return engine(weights).run(asks())


@pytest.mark.parametrize(
    "options",
    [{"step_tokens": 14}, {"requests": 1}, {"drafts": 3}, {"drafts": 7}],
    ids=["chunked", "one by one", "verify 4", "verify 8"],
)
def test_every_mode_gives_the_same_log_probabilities(
    weights: ModelWeights, plain: dict[str, Completion], options: dict
) -> None:
    """Chunk borders, neighbours and verify steps must not change what a request gets."""
    with torch.inference_mode():
        assert difference(plain, engine(weights, **options).run(asks())) < CLOSE_NATS


def test_teacher_forced_decode_equals_a_longer_prefill(weights: ModelWeights, plain: dict[str, Completion]) -> None:
    """The last token's probability after decode steps is that after prefilling everything before it."""
    longer = [
        replace(r, prompt=r.prompt + r.forced[:-1], forced=r.forced[-1:], params=SamplingParams(max_tokens=1))
        for r in asks()
    ]
    with torch.inference_mode():
        done = engine(weights).run(longer)
    assert sum(abs(done[k].logprobs[-1] - plain[k].logprobs[-1]) for k in done) / len(done) < CLOSE_NATS


def test_another_requests_text_is_not_close(weights: ModelWeights, plain: dict[str, Completion]) -> None:
    """The bound above must be able to fail."""
    others = asks()[::-1]
    swapped = [replace(r, prompt=o.prompt) for r, o in zip(asks(), others, strict=True) if r.id != o.id]
    with torch.inference_mode():
        done = engine(weights).run(swapped)
    assert min(difference({k: plain[k]}, {k: done[k]}) for k in done) > CLOSE_NATS


def test_speculative_greedy_text_is_what_plain_decode_would_choose(weights: ModelWeights) -> None:
    """Scored by plain decode, each token of a drafted text is the best one or as good as that."""
    free = [replace(r, forced=(), params=SamplingParams(max_tokens=20)) for r in asks()]
    with torch.inference_mode():
        drafted = engine(weights, drafts=3).run(free)
        scored = engine(weights).run([replace(r, forced=drafted[r.id].tokens) for r in free])
    assert sum(c.drafted for c in drafted.values()) > 0
    assert max(sum(c.regrets) / len(c.regrets) for c in scored.values()) < CLOSE_NATS


def test_certain_drafts_are_accepted_and_save_steps(weights: ModelWeights) -> None:
    """Forced tokens as drafts must all be kept: acceptance bookkeeping that loses one would cost steps for ever."""
    with torch.inference_mode():
        slow, fast = engine(weights), engine(weights, drafts=3)
        slow.run(asks(forced=9))
        done = fast.run(asks(forced=9))
    assert all(c.accepted >= 6 for c in done.values())
    assert fast.steps < slow.steps


def test_slots_and_pages_left_by_others_do_not_matter(weights: ModelWeights, plain: dict[str, Completion]) -> None:
    """A request that inherits a used slot starts from zero state."""
    with torch.inference_mode():
        used = engine(weights)
        used.run([replace(r, id=f"old-{r.id}", prompt=r.prompt[::-1]) for r in asks()])
        assert difference(plain, used.run(asks())) < CLOSE_NATS


def test_aborted_request_frees_everything_and_neighbours_do_not_notice(
    weights: ModelWeights, plain: dict[str, Completion]
) -> None:
    """An abort in the middle of decoding returns slots and pages and changes nobody else."""
    with torch.inference_mode():
        running = engine(weights)
        for request in asks():
            running.add(request)
        running.step()
        ended = running.abort("r1")
        assert ended is not None
        assert ended.finish == "aborted"
        assert running.abort("r1") is None
        done = running.run()
    assert len(running.pages) == running.state.pages - 1
    assert len(running.slots) == running.state.slots - 1
    assert difference({k: v for k, v in plain.items() if k != "r1"}, done) < CLOSE_NATS


def test_sampling_follows_the_distribution_and_repeats_with_its_seed() -> None:
    """Gumbel-max draws must have softmax frequencies; the same seed and position give the same token."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = torch.zeros(4)
    for seed in range(4000):
        choice = choose(logits, SamplingParams(max_tokens=1, temperature=1.0, seed=seed), position=5)
        assert choice is not None
        counts[choice.token] += 1
    assert torch.allclose(counts / 4000, logits.softmax(0), atol=0.03)
    assert torch.equal(gumbel_noise(1, 2, 8), gumbel_noise(1, 2, 8))
    assert not torch.equal(gumbel_noise(1, 2, 8), gumbel_noise(1, 3, 8))


def test_greedy_takes_the_lowest_of_equal_tokens_and_masks_hold() -> None:
    """Ties and masks are rules, not accidents of the backend."""
    greedy = SamplingParams(max_tokens=1)
    assert choose(torch.tensor([0.0, 3.0, 3.0]), greedy, 0).token == 1
    assert choose(torch.tensor([0.0, 3.0, 1.0]), replace(greedy, allowed_ids=(0, 2)), 0).token == 2


def test_non_finite_logits_end_the_request_as_such(weights: ModelWeights) -> None:
    """A NaN must never become a token."""
    broken = engine(weights)

    def forward(batch: Batch) -> Tensor:
        hidden = standard.forward(weights, broken.state, batch)
        return torch.full_like(hidden, torch.nan) if batch.pure_decode else hidden

    broken.forward = forward
    with torch.inference_mode():
        done = broken.run(asks(2))
    assert {c.finish for c in done.values()} == {"nonfinite"}
    assert all(len(c.tokens) == 1 for c in done.values())


def test_requests_wait_for_pages_and_impossible_ones_are_refused(weights: ModelWeights) -> None:
    """A full pool delays a request; one that can never fit is an error at once, not a hang."""
    small = engine(weights, pages=8)
    with torch.inference_mode():
        assert len(small.run(asks())) == 5
    with pytest.raises(ValueError, match="pages"):
        small.add(Request(id="big", prompt=(1,) * 200, params=SamplingParams(max_tokens=1)))


def test_pool_refuses_double_return_and_null() -> None:
    """Two owners of one slot would mix two conversations."""
    pool = Pool(4)
    ids = pool.take(2)
    assert ids is not None
    pool.give(ids)
    with pytest.raises(ValueError, match="twice"):
        pool.give(ids[:1])
    with pytest.raises(ValueError, match="twice"):
        pool.give([0])
    assert pool.take(4) is None


def test_drafter_copies_what_followed_the_longest_earlier_match() -> None:
    """Always exactly as many tokens as asked for, so that verify batches stay uniform."""
    assert draft([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert draft([5, 6], 2) == [6, 6]
    assert draft([4], 0) == []
