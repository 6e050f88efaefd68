import functools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from roundpipe_commands import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT, plan
from roundpipe_lightning import Plan
from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.cli.job import Job, MetaModel
from roundpipe_lightning.cli.plan import command as plan_module
from roundpipe_lightning.cli.plan.answer import cheapest_changes
from roundpipe_lightning.cli.plan.command import PlanOutput, run
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.work.work_profile import work_profile
from roundpipe_lightning.modules import Adapters
from roundpipe_lightning.planning.cost.device_memory import MemoryKind
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.planning.search.fit import TrainingJob
from roundpipe_lightning.planning.search.partition import Effort
from roundpipe_lightning.planning.search.remedies import Price
from tests.kit.programs import run_program
from tests.kit.runs import SMALL, composed, environment, files, train_small

GPU = ("hardware=rtx4090x4", "data.batch_size=8")
TIGHT = (*GPU, "hardware.device_bytes=443250000", "model.architecture.num_hidden_layers=4")
"""Device memory for some of the tiny model's microbatches, beside what the runtime takes."""

MIB = 2**20


def configure(folder: Path, *overrides: str) -> DictConfig:
    return composed("plan", f"paths.output_dir={folder}", *overrides)


class Ask:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def json(self, *overrides: str, status: int = 0) -> dict[str, Any]:
        assert run(configure(self.folder, "output=json", *overrides)) == status
        lines = self._capsys.readouterr().out.splitlines()
        assert len(lines) == 1, "one object, nothing else"
        found: dict[str, Any] = json.loads(lines[0])
        return found

    def text(self, *overrides: str, status: int = 0) -> str:
        assert run(configure(self.folder, *overrides)) == status
        return self._capsys.readouterr().out

    def error(self, *overrides: str) -> str:
        assert run(configure(self.folder, *overrides)) == EXIT_BAD_INPUT
        captured = self._capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return captured.err


_models: dict[str, MetaModel] = {}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up what a model does if an earlier test had it, and search less than a user would."""
    monkeypatch.setattr(plan_module, "Job", functools.partial(Job, models=_models))
    defaults: Any = Effort.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "num_generations", 2)


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    return Ask(tmp_path, capsys)


def test_the_answer_is_one_object_and_a_folder(ask: Ask) -> None:
    found = ask.json(*GPU)
    assert found["fits"] is True
    assert found["model"]["num_parameters"] == 1_609_344
    assert found["job"]["num_microbatches"] in (4, 8)
    plan = Plan.load(ask.folder / "plan.json")
    assert list(plan.partition.forward) == found["plan"]["forward_partition"]
    assert list(plan.partition.backward) == found["plan"]["backward_partition"]
    assert plan.num_microbatches == found["job"]["num_microbatches"]
    assert plan.block_names[0] == "model.model.layers.0"
    for place in ("device", "host"):
        need = found["memory"][place]
        assert need["total_bytes"] == sum(need["by_kind"].values()) <= need["available_bytes"]
    assert found["moved"]["weights"] > 0
    predicted = found["predicted"]
    assert predicted["tokens_per_second"] == pytest.approx(8 * 128 / predicted["step_seconds"])
    assert 0 <= predicted["idle_share"] < 1
    gains = found["bottleneck"]["gains"]
    assert found["bottleneck"]["resource"] == max(gains, key=gains.__getitem__)
    assert found["changes"] == []
    ET.parse(ask.folder / "timeline.svg")
    assert json.loads((ask.folder / "timeline.json").read_text())["traceEvents"]
    assert json.loads((ask.folder / "report.json").read_text()) == found


def test_a_readable_page(ask: Ask) -> None:
    page = ask.text(*GPU)
    for words in ("Stages:", "Teams of", "Memory", "Moved per step", "tokens/s", "Bottleneck"):
        assert words in page
    assert page.count("It fits.") == 1
    assert str(ask.folder / "timeline.svg") in page
    [step] = re.findall(r"Predicted step: (\S+) s", page)
    picture = (ask.folder / "timeline.svg").read_text()
    assert f"of a predicted step of {step} s" in picture, "the picture says what the page says"
    assert re.search(r"The wrong tool: devices wait .* each\. DDP", page)
    mixed = ask.text("hardware=mixed", "hardware.devices={rtx4090: 1, rtx3080: 2}")
    assert "1 x GeForce RTX 4090, 23.99 GiB each, 2 x GeForce RTX 3080, 10.00 GiB each" in mixed
    assert re.search(r"The wrong tool: .* FSDP", ask.text("hardware=h100x8"))
    # Published: on eight RTX 4090 FSDP trains it at a quarter of RoundPipe's tokens per second.
    page = ask.text("model=qwen3_1_7b", "hardware=rtx4090x8")
    assert "fewer waits with more tokens a step" in page
    assert "The wrong tool" not in page


def test_both_ways_to_split_a_batch_are_predicted(ask: Ask) -> None:
    """In blocks the tail segment runs on one device, when all microbatches have gone forward."""
    given = (*GPU, "partition.num_microbatches=8", "model.architecture.num_hidden_layers=4")
    left_open = ask.json(*given, "trainer.strategy.microbatching=auto")
    assert not Plan.load(ask.folder / "plan.json").joined
    blocks = ask.json(*given, "trainer.strategy.microbatching=blocks")
    assert Plan.load(ask.folder / "plan.json").joined
    predicted = blocks["predicted"]["step_seconds"]
    assert left_open["predicted_with_blocks"] == predicted
    assert predicted > left_open["predicted"]["step_seconds"]
    page = ask.text(*given, "trainer.strategy.microbatching=auto")
    assert f"with trainer.strategy.microbatching=blocks: {predicted:.4g} s" in page


def test_what_does_not_fit_gets_changes_that_do(ask: Ask) -> None:
    found = ask.json(*TIGHT, "data.seq_len=1024", status=EXIT_DOES_NOT_FIT)
    assert found["fits"] is False
    assert found["plan"] is None
    assert "cannot hold even one block, 'model.model.layers." in found["missing"]
    assert 1 <= len(found["changes"]) <= 4
    shorter = [c for c in found["changes"] if c["overrides"][-1].startswith("data.seq_len")]
    assert shorter
    for change in found["changes"]:
        if not any(override.startswith("hardware=") for override in change["overrides"]):
            again = ask.json(*TIGHT, "data.seq_len=1024", *change["overrides"])
            assert again["fits"] is True


def test_what_its_parameters_rule_out_is_not_measured(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []

    def counted(module: Any, *args: Any, **options: Any) -> WorkProfile:
        measured.append(options)
        return work_profile(module, *args, **options)

    monkeypatch.setattr("roundpipe_lightning.cli.job.work_profile", counted)
    little = (*GPU, "hardware.device_bytes=420000000", "hardware.host_memory=1MB")
    ask.text(*little, status=EXIT_DOES_NOT_FIT)
    assert len(measured) <= 5, "the model, and what may be enough"


def test_jobs_that_differ_in_their_gradients_dtype_share_a_model(tmp_path: Path) -> None:
    models: dict[str, MetaModel] = {}

    def gradient_bytes(dtype: str) -> float:
        given = f"trainer.strategy.gradient_dtype={dtype}"
        job = Job(configure(tmp_path, *GPU, given), models=models)
        assert all(p.grad_dtype is p.dtype for p in job.model.module.parameters())
        return job.first_job.storage.gradient_bytes

    assert [gradient_bytes(dtype) for dtype in ("null", "bf16", "null")] == [4.0, 2.0, 4.0]
    assert len(models) == 1


def test_parameters_in_other_forms_are_counted_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(*settings: str) -> tuple[Any, ...]:
        found = Ask(tmp_path, capsys).json(*GPU, "peft=lora", *settings)
        num_frozen = found["model"]["num_parameters"] - found["model"]["num_trainable"]
        return num_frozen, found["memory"]["host"]["by_kind"]["weights"]

    plain, packed = asked(), asked("peft=qlora")
    assert packed[0] == plain[0]
    assert packed[1] < plain[1]
    paired = asked("module=preference", "data=preference")  # the reference has the same ones
    assert paired == pytest.approx(plain, rel=1e-3)


def test_attention_that_keeps_its_scores_is_counted_so(ask: Ask) -> None:
    long = (*GPU, "data.seq_len=1024", "partition.num_microbatches=8")
    fused, eager = (ask.json(*long, f"model.attention={each}") for each in ("sdpa", "eager"))
    scores = 4 * 1024**2 * 4  # of four heads, in float32
    need = [found["memory"]["device"]["by_kind"]["activations"] for found in (fused, eager)]
    assert need[1] - need[0] > 2 * scores
    few = (*GPU, "model=gpt_oss_20b", "model.architecture.num_hidden_layers=2")
    assert "Attention: eager" in ask.text(*few)
    assert "Attention: eager" not in ask.text(*few, "model.attention=flex_attention")


def test_short_sequences_are_planned_as_they_are_trained(ask: Ask) -> None:
    # The gradient of the LM head's weights is more than all logits of so few tokens.
    sizes = ("model.architecture.vocab_size=100000", "model.architecture.hidden_size=128")
    short = (*SMALL, *sizes, "partition.num_microbatches=2")
    planned = ask.json(*short)["memory"]["device"]["total_bytes"]
    trained = build_run(composed("train", *short, f"paths.output_dir={ask.folder}"))
    strategy: Any = trained.trainer.strategy
    events: list[Any] = []
    strategy.plan_listeners.append(events.append)
    trained.trainer.fit(trained.module, datamodule=trained.data)
    need = events[0].description.memory.device
    assert planned == pytest.approx(need.total_bytes, rel=0.02)
    assert not need.of(MemoryKind.GRADIENTS), "they come when the LM head's is gone"


@pytest.mark.parametrize(
    ("model", "peft"), [("qwen3_0_6b", "lora"), ("qwen3_0_6b", "qlora"), ("gpt_oss_20b", "qlora")]
)
def test_drawn_weights_are_planned_as_those_that_are_published(
    ask: Ask, model: str, peft: str
) -> None:
    few = (*GPU, f"model={model}", "model.architecture.num_hidden_layers=2", f"peft={peft}")
    drawn, published = (ask.json(*few, f"model.weights={each}") for each in ("auto", "pretrained"))
    assert drawn["memory"] == published["memory"]
    assert drawn["predicted"] == published["predicted"]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (("peft=qlora",), {1}),
        (("peft=lora", "+peft.layers_to_transform=[1]"), {8}),
    ],
)
def test_blocks_that_are_alike_get_copies_of_ones_adapters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    sizes: set[int],
) -> None:
    seen = set()

    def counted(adapters: Adapters, model: Any, **given: Any) -> Any:
        seen.add(len(list(model.model.layers)))
        return apply(adapters, model, **given)

    apply = Adapters.apply
    monkeypatch.setattr(Adapters, "apply", counted)
    job = Job(configure(tmp_path, *GPU, *settings))
    module = job.model.module
    assert seen == sizes
    whole: Any = job.new_module()
    with torch.device("meta"):
        whole.configure_model()

    def parts(module: torch.nn.Module) -> list[tuple[str, str]]:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shapes = [(name, f"{t.shape} {t.dtype} {t.requires_grad}") for name, t in tensors.items()]
        return shapes + [(name, type(part).__name__) for name, part in module.named_modules()]

    assert parts(module) == parts(whole)
    assert len({id(tensor) for tensor in module.parameters()}) == len(list(module.parameters()))


def test_of_what_no_device_holds_the_smallest_microbatches_alone_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(configure(tmp_path, *GPU, "hardware.device_bytes=420000000", "data.batch_size=64"))
    asked: list[int] = []
    training = job.training

    def counted(count: int) -> TrainingJob:
        asked.append(count)
        return training(count)

    monkeypatch.setattr(job, "training", counted)
    assert "cannot hold" in job.answer().reason_no_plan
    assert asked == job.microbatch_counts()[:1] == [64]


def test_a_tail_segment_that_is_too_large_is_named(tmp_path: Path) -> None:
    large = "model.architecture.vocab_size=100000"
    job = Job(configure(tmp_path, *TIGHT, large), models=_models)
    report = PlanOutput(job=job, answer=job.answer())
    assert "cannot hold the tail segment: it has 48.8 MiB of weights" in report.missing


def test_host_memory_that_is_missing_is_named_with_what_mends_it(ask: Ask) -> None:
    page = ask.text(*GPU, f"hardware.host_bytes={20 * MIB}", status=EXIT_DOES_NOT_FIT)
    assert "It does not fit." in page
    assert "MiB of host memory are missing" in page
    found = json.loads((ask.folder / "report.json").read_text())
    assert found["plan"] is not None
    assert len(found["changes"]) == 4
    prices = [Price[change["price"].upper()] for change in found["changes"]]
    assert prices == sorted(prices)
    for change in found["changes"]:
        speed = f"{change['tokens_per_second']:,.0f} tokens/s"
        text = f"{' '.join(change['overrides'])} ({change['cost']}; {speed}, "
        assert re.match(r"(as|[\d.]+ times as) fast\)", page.partition(text)[2]), text


def test_changes_of_every_kind_are_offered(tmp_path: Path) -> None:
    job = Job(configure(tmp_path, *TIGHT, "hardware.host_memory=30MiB"), models=_models)
    found = cheapest_changes(job, count=12)
    assert {override for remedy, _ in found for override in remedy.change.overrides} >= {
        *("data.batch_size=4", "trainer.accumulate_grad_batches=2"),
        *("optimizer=adamw_8bit", "optimizer=adamw_bf16_moments", "optimizer=adamw_disk"),
        *("trainer.precision=bf16-true", "trainer.strategy.gradient_dtype=bf16"),
        *("peft=lora", "peft=qlora", "nodes=2"),
    }


def test_the_longest_sequence(ask: Ask) -> None:
    wider = "model.architecture.max_position_embeddings=100000"
    found = ask.json(*TIGHT, wider, "longest=true")
    longest = found["longest_seq_len"]
    assert found["job"]["seq_len"] == longest
    assert f" data.seq_len={longest} partition=saved" in ask.text(*TIGHT, wider, "longest=true")
    assert longest > 0
    assert ask.json(*TIGHT, wider, f"data.seq_len={longest}")["fits"]
    longer = f"data.seq_len={longest + 128}"
    ask.json(*TIGHT, wider, longer, "partition.num_microbatches=8", status=EXIT_DOES_NOT_FIT)
    few = "model.architecture.max_position_embeddings=256"
    text = ask.text(*TIGHT, few, "longest=true")  # what the printed command says is no more
    assert " data.seq_len=256 partition=saved" in text
    assert "256 tokens\n  the model knows no more positions (256)" in text


def test_more_hosts_have_less_in_memory_and_wait_for_the_network(ask: Ask) -> None:
    given = (*GPU, "trainer.gradient_clip_val=null", "network=1GbE")
    found = ask.json(*given, "nodes=[1,2,4]")
    trained = found["model"]["num_trainable"]
    one, two, four = found["nodes"]
    assert [row["num_nodes"] for row in found["nodes"]] == [1, 2, 4]
    assert found["predicted"]["step_seconds"] == one["step_seconds"]
    for row, share in ((one, 0), (two, 1 / 2), (four, 3 / 4)):
        # 6 bytes of a block's parameters, 8 of others
        assert share * trained * 6 <= row["sent_bytes"] <= share * trained * 8
        assert row["network_seconds"] == pytest.approx(row["sent_bytes"] / (0.9 * 125e6))
        # 16 bytes of a block's parameters, 8 of others
        less = one["host_bytes"] - row["host_bytes"]
        assert share * 8 * trained <= less <= (share * 16 + (row is not one)) * trained
        room = row["step_seconds"] - row["waiting_seconds"]
        assert row["hidden_tokens"] == pytest.approx(8 * 128 * row["network_seconds"] / room)
        seconds = row["step_seconds"]
        assert row["tokens_per_second"] == pytest.approx(row["num_nodes"] * 8 * 128 / seconds)
    assert two["waiting_seconds"] > 0, "a small model's step is short"
    assert ask.json(*given, "nodes=2")["nodes"] == [two]
    small = ask.json(*given, "nodes=2", "trainer.strategy.memory_share=0.25")["nodes"][0]
    assert small["host_bytes"] == pytest.approx(four["host_bytes"])
    page = ask.text(*given, "nodes=2")
    assert f"tokens per step and host on: {two['hidden_tokens']:,.0f}" in page
    assert re.search(r"torchrun --nnodes=2 .* train\.py nodes=2 ", page)
    quick = ask.json(*given[:-1], "network=100GbE", "nodes=2")["nodes"][0]
    assert quick["network_seconds"] == pytest.approx(two["network_seconds"] / 100)
    clipped = ask.json(*GPU, "network=1GbE", "nodes=2")["nodes"][0]
    assert clipped["waiting_seconds"] > two["waiting_seconds"], "nothing is stepped early"
    accumulated = ask.json(*GPU, "nodes=2", "trainer.accumulate_grad_batches=2")["nodes"][0]
    assert accumulated["hidden_tokens"] is None


def test_the_global_batch_is_divided_among_hosts(ask: Ask) -> None:
    given = (*GPU, "global_batch_size=16")
    assert ask.json(*given, "nodes=auto")["job"]["batch_size"] == 16
    for row in ask.json(*given, "nodes=[1,2]")["nodes"]:
        assert row["tokens_per_second"] == pytest.approx(16 * 128 / row["step_seconds"])
    assert "cannot be divided among 3 hosts" in ask.error(*given, "nodes=3")
    hosts = ask.json("global_batch_size=16", "nodes=[rtx4090x4,rtx4090x1]")["hosts"]
    assert sum(host["batch_size"] for host in hosts) == 16
    assert "global_batch_size" not in ask.text(*given, "nodes=[rtx4090x4,rtx4090x1]")
    job = Job(
        configure(ask.folder, *given, "hardware.host_memory=17MiB", "nodes=2"), models=_models
    )
    changes = [remedy.change.overrides for remedy, _ in cheapest_changes(job, count=9)]
    assert ("nodes=4", "global_batch_size=16") in changes, "the key that training reads"


def test_uneven_hosts_get_parts_of_the_batch_by_their_speed(ask: Ask) -> None:
    hosts = ask.json("nodes=[rtx4090x4,rtx4090x1]", "data.batch_size=64", "network=100GbE")["hosts"]
    large, small = hosts
    speeds = [host["alone_tokens_per_second"] for host in hosts]
    assert large["batch_size"] + small["batch_size"] == 128
    assert large["batch_size"] == pytest.approx(128 * speeds[0] / sum(speeds), abs=1)
    assert speeds[0] > 1.5 * speeds[1]
    page = ask.text("nodes=[rtx4090x4,rtx4090x1]", "data.batch_size=64", "network=100GbE")
    assert f"trainer.strategy.host_share={speeds[1]:.0f}" in page


def test_hosts_without_room_get_less_of_the_optimizers_state(ask: Ask) -> None:
    """As much on each where that fits; else by the room that each host has."""
    machines = []
    for name, host_bytes in (("large", 2**36), ("small", 16 * MIB)):
        figures = asdict(replace(load_hardware("rtx4090x4"), host_bytes=host_bytes))
        for key in ("num_nodes", "memory_share", "unequal"):
            del figures[key]
        machines.append(ask.folder / f"{name}.yaml")
        machines[-1].write_text(json.dumps({**figures, "name": name}))
    page = ask.text(f"nodes=[{machines[0]},{machines[1]}]", "data.batch_size=8")
    large, small = json.loads((ask.folder / "report.json").read_text())["hosts"]
    assert small["fits"]
    assert small["host_bytes"] <= 16 * MIB
    assert 0 < small["memory_share"] < 0.5
    assert large["memory_share"] + small["memory_share"] == pytest.approx(1)
    assert f" trainer.strategy.memory_share={small['memory_share']:g}\n" in page
    alone = (f"hardware_file={machines[1]}", "trainer.num_nodes=2", "data.batch_size=8")
    changes = ask.json(*alone, status=EXIT_DOES_NOT_FIT)["changes"]
    [less] = [each for each in changes if "memory_share" in str(each["overrides"])]
    assert 0 < float(less["overrides"][0].partition("=")[2]) < 0.5


@pytest.mark.parametrize(
    ("optimizer", "state_bytes", "disk_bytes"),
    [
        ("adamw", 8, 0),
        ("host_adamw", 8, 0),
        ("adamw_bf16_moments", 4, 0),
        ("adamw_8bit", 2 + 8 / 256, 0),
        ("adamw_disk", 0, 8),
    ],
)
def test_optimizer_state_is_what_its_choice_keeps(
    ask: Ask, optimizer: str, state_bytes: float, disk_bytes: float
) -> None:
    found = ask.json(*GPU, f"optimizer={optimizer}")
    trained = found["model"]["num_trainable"]
    in_memory = found["memory"]["host"]["by_kind"]["optimizer state"]
    windows = min(trained * disk_bytes, 3 * 64 * MIB)
    assert in_memory == pytest.approx(trained * state_bytes + windows, abs=1)
    assert found["optimizer_disk_bytes"] == pytest.approx(trained * disk_bytes, abs=1)
    if disk_bytes:
        assert "disk: " in ask.text(*GPU, f"optimizer={optimizer}")


def test_hints_are_kept(ask: Ask) -> None:
    cuts = ("partition.forward=[1,2,3]", "partition.backward=[2,3,3]")
    found = ask.json(*GPU, *cuts, "partition.team_size=2", "partition.round_size=4")
    assert found["plan"]["forward_partition"] == [1, 2, 3]
    assert found["plan"]["backward_partition"] == [2, 3, 3]
    assert (found["plan"]["team_size"], found["plan"]["round_size"]) == (2, 4)
    limits = ("partition.limits.forward=2", "partition.limits.backward=1")
    found = ask.json(*GPU, *limits, "partition.limits.fused=0", "partition.team_size=1")
    assert found["plan"]["backward_partition"] == [0] + [1] * 8
    assert max(found["plan"]["forward_partition"]) <= 2


def test_how_a_step_is_computed_is_part_of_the_plan(ask: Ask) -> None:
    given = (*GPU, "model.architecture.vocab_size=60000", "partition.num_microbatches=8")
    plain, fused = (ask.json(*given, f"trainer.strategy.loss={a}") for a in ("eager", "fused"))
    kept = [found["memory"]["device"]["by_kind"]["activations"] for found in (plain, fused)]
    assert kept[1] < kept[0], "no whole logits"
    ask.json(*GPU, "trainer.strategy.workers_per_device=2")
    assert Plan.load(ask.folder / "plan.json").num_workers == 8
    for precision, rate in (("auto", "bfloat16"), ("16-mixed", "float16"), ("32-true", "float32")):
        job = Job(configure(ask.folder, *GPU, f"trainer.precision={precision}"), models=_models)
        assert job.first_job.dtype == rate
    assert "follows from the parameters alone" in ask.text(*GPU, "trainer.strategy.dry_run=false")


def test_what_is_held_can_be_settled(ask: Ask) -> None:
    slots = ("partition.weight_slots=1", "partition.recompute=full", "partition.limits.fused=0")
    held = (*slots, "partition.resident=2", "partition.team_size=4")
    found = ask.json(*GPU, *held)
    assert (found["plan"]["weight_slots"], found["plan"]["recompute"]) == (1, "full")
    assert {len(blocks) for blocks in found["plan"]["resident"]} == {2}
    assert found["plan"]["resident_bytes"][0] > 0
    assert found["moved"]["weights_saved"] > 0
    assert found["memory"]["device"]["by_kind"]["resident weights"] > 0
    saved = Plan.load(ask.folder / "plan.json")
    assert [list(blocks) for blocks in saved.resident] == found["plan"]["resident"]
    page = ask.text(*GPU, *held)
    assert "Slots for weights: 1" in page
    assert "Resident: 2 blocks on each device" in page
    whole = ask.json(*GPU, "partition.recompute=none")
    assert whole["plan"]["backward_partition"] == [8]


def test_what_cannot_be_held_is_refused_with_its_size_and_ends_with_3(tmp_path: Path) -> None:
    small = (*GPU, "hardware.device_bytes=464000000", "data.seq_len=1024", "hydra.run.dir=run")
    done = run_program(plan, tmp_path, *small, "partition.recompute=none")
    assert (done.returncode, done.stderr) == (3, "")
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    assert "recompute=none needs all 8 blocks on one device at once" in found["missing"]
    assert found["missing"] in " ".join(done.stdout.split())
    assert "partition.recompute=auto" in [c["overrides"][0] for c in found["changes"]]


def test_accumulated_batches_are_said_in_the_answer_and_in_the_file(ask: Ask) -> None:
    found = ask.json(*GPU, "trainer.accumulate_grad_batches=3")
    assert found["plan"]["num_batches"] == found["job"]["num_batches"] == 3
    predicted = found["predicted"]
    assert predicted["one_by_one_seconds"] >= predicted["step_seconds"]
    plan = Plan.load(ask.folder / "plan.json")
    assert plan.num_batches == 3
    assert plan.num_microbatches == found["job"]["num_microbatches"]
    assert plan.round_size == found["plan"]["round_size"]


def test_without_a_name_the_machine_is_the_one_at_hand(ask: Ask) -> None:
    found = ask.json("data.batch_size=8", "hardware.host_memory=3GiB")
    assert found["machine"]["num_devices"] == 4
    assert found["machine"]["host_bytes"] == 3 * 2**30
    assert set(found["moved"].values()) == {0}
    assert "this machine has no accelerator" in ask.error("hardware=gpu")


def test_a_saved_plan_is_judged_as_it_is(ask: Ask) -> None:
    cuts = ("partition.forward=[4,2]", "partition.backward=[2,3,3]", "partition.team_size=1")
    made = ask.json(*GPU, *cuts)
    saved = ask.folder / "saved.json"
    (ask.folder / "plan.json").rename(saved)
    again = ask.json(*GPU, f"partition.plan={saved}")
    assert again["plan"] == made["plan"]
    assert again["predicted"] == made["predicted"]
    assert "drop one" in ask.error(*GPU, f"partition.plan={saved}", "partition.team_size=1")
    refused = ask.error("hardware=rtx4090x2", f"partition.plan={saved}")
    assert "4 workers" in refused
    assert "set partition=auto." in refused, "the command's key, not the strategy's argument"
    assert "made for another batch" in ask.error(
        *GPU[:1], "data.batch_size=2", f"partition.plan={saved}"
    )
    fewer = "model.architecture.num_hidden_layers=7"
    assert "8 blocks" in ask.error(*GPU, f"partition.plan={saved}", fewer)
    saved.write_text(saved.read_text().replace('"format_version": 3', '"format_version": 99'))
    assert "format_version=99" in ask.error(*GPU, f"partition.plan={saved}")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["hardware.host_bytes=-1"], "host_bytes=-1"),
        (["hardware=rtx4090", "hardware.devices=0"], "devices=0: give a number above 0"),
        ([*GPU, "hardware.upload_bytes_per_second=-1"], "upload_bytes_per_second=-1: give"),
        (["~hardware.device_bytes"], "missing figures: device_bytes"),
        (["hardware_file=nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["hardware_file=rtx409x8"], "rtx4090x8"),
        (["hardware.host_memory=600"], "host_memory=600: give a size with its unit"),
        (["network=fast"], "network=fast: give gigabits per second, such as network=10GbE"),
        (["nodes=[0,2]"], "give numbers of hosts, such as nodes=1,2,4"),
        (["nodes=[rtx4090x4,rtx409x4]"], "The nearest are rtx4090"),
        (["trainer.strategy.host_share=-1"], "host_share=-1: give a number above 0"),
        (["trainer.strategy.memory_share=2"], "memory_share=2: give this host's part"),
        (["seed=abc"], "seed='abc': give a whole number"),
        (["output=jsn"], "output=jsn is not one of text, json"),
        (["trainer.strategy.loss=fusd"], "set 'auto', 'fused' or 'eager'"),
        (["trainer.precision=bf16-mix"], "The nearest is bf16-mixed"),
        (["trainer.precision=bf16"], "The nearest is bf16-mixed"),  # as Lightning understands it
        (["trainer.precision=fp16"], "The nearest is 16-mixed"),
        (["data.seq_len=1e9"], "data.seq_len=1000000000.0: give a whole number"),
        (["data.seq_len=2048"], "longer than the 1024 positions"),
        (["partition.num_microbatches=9"], "more than the data.batch_size=8"),
        (["partition.plan=nowhere.json"], "nowhere.json"),
        (["partition.forward=[5,5]"], "has 10 blocks, the model has 8"),
        (["partition.forward=[4,4]", "partition.backward=[2,6]"], "sum"),
        (["partition.blocks=[model.nowhere]"], "model.nowhere"),
        (["partition.team_size=3"], "does not divide the 4 devices"),
        (["partition.forward=4"], "give whole numbers, such as"),
        (["partition.recompute=ful"], "set 'auto', 'full', 'selective' or 'none'"),
        (["partition.recompute=none", "partition.forward=[8]"], "has others: drop one of the two"),
        (["partition.recompute=none", "partition.limits.fused=1"], "limits.fused=1: drop one"),
        (["partition.weight_slots=3"], "partition.weight_slots=3 must be 1 or 2"),
        (["partition.resident=-1"], "partition.resident=-1 must be 0 or more"),
        (["partition.resident=9"], "more than the 8 blocks"),
        (["peft=lora", "peft.target_modules=[q_prj]"], "The nearest are q_proj"),
        (["peft=lora", "peft.r=0"], "peft.r=0"),
        (["peft=lora", "peft.frozen_bits=3"], "frozen_bits=3"),
        (
            ["model=gpt_oss_20b", "model.weights=pretrained", "model.frozen_weights=mmap"],
            "in a quantised form that has to be unpacked. Use model.frozen_weights=memory.",
        ),
        (["+model.architecture.hidden_sice=64"], "no such field. The nearest are hidden_size"),
        (["+model.architecture.foo=1"], "a configuration of 'qwen3' has no such field"),
        (["+model.architecture.rope_scaling.type=linear"], "not a valid 'qwen3' architecture"),
    ],
)
def test_bad_input_is_one_clear_message(ask: Ask, overrides: list[str], reason: str) -> None:
    assert reason in ask.error(*GPU, *overrides)
    assert list(ask.folder.iterdir()) == []


def test_training_keeps_hints(tmp_path: Path) -> None:
    hints = ("partition.team_size=2", "partition.limits.backward=1", "partition.forward=[1]")
    train_small(tmp_path, *hints, "trainer.max_steps=1")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.team_size == 2
    assert plan.partition.forward == (1,)
    assert plan.partition.backward == (1, 1)


@pytest.mark.parametrize("mode", ["step", "blocks"])
def test_the_plan_is_one_that_trains(ask: Ask, mode: str) -> None:
    size = [override for override in SMALL if override.startswith(("model.", "data.seq", "data.b"))]
    size.append(f"trainer.strategy.microbatching={mode}")
    ask.json(*size, "hardware=cpu", "partition.team_size=2", "partition.num_microbatches=4")
    folder = ask.folder / "trained"
    plan = ask.folder / "plan.json"
    saved = ("partition=saved", f"partition.plan={plan}", "partition.num_microbatches=4")
    figures = train_small(folder, *saved, size[-1], "trainer.max_steps=1")
    assert figures["num_steps"] == 1
    assert Plan.load(folder / "plan.json") == Plan.load(plan)


def test_a_plan_for_devices_trains_on_processors_where_no_block_has_to_stay(ask: Ask) -> None:
    size = [override for override in SMALL if override.startswith(("model.", "data.seq", "data.b"))]
    ask.json(*size, "hardware=rtx4090x4", "partition.num_microbatches=4")
    plan = ask.folder / "plan.json"
    assert any(Plan.load(plan).resident)
    saved = ("partition=saved", f"partition.plan={plan}", "trainer.max_steps=1")
    assert train_small(ask.folder / "trained", *saved)["num_steps"] == 1


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft")
def test_adapters_that_peft_cannot_make_without_weights_are_refused(tmp_path: Path) -> None:
    config = configure(tmp_path, *GPU)
    config.peft = {"_target_": "peft.BOFTConfig", "target_modules": ["q_proj"]}
    with pytest.raises(ConfigurationError, match="so it cannot be planned"):
        Job(config).answer()


@pytest.mark.soak
def test_an_answer_is_one_object_on_standard_output(tmp_path: Path) -> None:
    """With a torch that was built from its source, too, which is in no site-packages."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "torch").symlink_to(Path(torch.__file__).parent)
    done = subprocess.run(
        [
            *(sys.executable, "-c", "import roundpipe_commands; roundpipe_commands.plan()"),
            *("hardware=rtx4090x2", "output=json", "peft=lora", "nodes=1,2"),
            "model.architecture.num_hidden_layers=2",
        ],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{clone}:{Path(__file__).parents[2]}"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # bitsandbytes, which peft imports, says on some processors that it lacks a kernel.
    assert [line for line in done.stderr.splitlines() if "kernels-community" not in line] == []
    answer = json.loads(done.stdout)
    assert answer["machine"]["name"] == "rtx4090x2"
    assert [row["num_nodes"] for row in answer["nodes"]] == [1, 2]
    [folder] = (tmp_path / "logs" / "plan" / "runs").iterdir()
    assert files(folder) >= {"plan.json", "report.json", "timeline.json", "timeline.svg"}
