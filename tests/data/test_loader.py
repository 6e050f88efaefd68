"""The order of the batches, and going on in the middle of an epoch."""

import torch

from roundpipe_lightning.data.loader import ResumableLoader, SeededOrder, Windows


def make_loader(*, seed: int = 0, num_workers: int = 0) -> ResumableLoader:
    windows = Windows(torch.arange(22, dtype=torch.int16).reshape(11, 2))
    order = SeededOrder(len(windows), seed=seed)
    return ResumableLoader(windows, order=order, batch_size=2, num_workers=num_workers)


def epoch(loader: ResumableLoader, number: int) -> list[list[int]]:
    loader.order.set_epoch(number)
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def test_an_epoch_has_every_window_at_most_once() -> None:
    batches = epoch(make_loader(), 0)
    assert len(batches) == len(make_loader()) == 5
    seen = [index for batch in batches for index in batch]
    assert len(set(seen)) == len(seen) == 10


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = epoch(make_loader(seed=1), 0)
    torch.manual_seed(99)
    assert epoch(make_loader(seed=1), 0) == first
    assert epoch(make_loader(seed=2), 0) != first
    assert epoch(make_loader(seed=1), 1) != first


def test_ids_and_labels_are_alike_and_apart() -> None:
    batch = next(iter(make_loader()))
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = epoch(make_loader(), 3)
    loader = make_loader()
    loader.order.set_epoch(3)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert epoch(resumed, 3) == whole[2:]
    assert epoch(resumed, 4) == epoch(make_loader(), 4)


def test_counts_from_the_epochs_start_after_a_resume() -> None:
    loader = make_loader()
    loader.load_state_dict({"num_yielded": 2})
    batches = iter(loader)
    next(batches)
    assert loader.state_dict() == {"num_yielded": 3}


def test_an_epoch_that_was_over_starts_the_next_one() -> None:
    loader = make_loader()
    loader.load_state_dict({"num_yielded": 5})
    assert len(epoch(loader, 1)) == 5


def test_other_processes_prepare_the_same_batches() -> None:
    loader = make_loader(num_workers=1)
    assert epoch(loader, 2) == epoch(make_loader(), 2)
    del loader
