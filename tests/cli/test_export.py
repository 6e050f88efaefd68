import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import roundpipe_commands
from roundpipe_lightning.checkpoint.io import RoundPipeCheckpointIO
from roundpipe_lightning.cli.checkpoints import export
from roundpipe_lightning.cli.train import write_card
from roundpipe_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    FitError,
    ModelSourceError,
)
from roundpipe_lightning.models.weight_files import MARKER
from roundpipe_lightning.modules import ModelSource, TokenizerSource
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.hub import hub, no_hub
from tests.kit.programs import run_program
from tests.kit.runs import REPOSITORY, SMALL, composed, environment, train_small
from tests.models.test_load import EXPERTS, save


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_small(folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def run_export(*overrides: str) -> Path:
    return export(composed("export", *overrides))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(9)[None]).logits
    return result


def plain(config: Any) -> dict[str, Any]:
    container: Any = OmegaConf.to_container(config)
    return dict(container)


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def state_of(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(checkpoint_of(run), weights_only=True)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def test_a_run_is_exported_from_its_checkpoint_alone(run: Path) -> None:
    io, last = RoundPipeCheckpointIO(form="distributed"), checkpoint_of(run)
    io.save_checkpoint(torch.load(last), run / "checkpoints" / "written.ckpt")
    folder = run_export(f"ckpt_path={run}/checkpoints/written.ckpt")
    assert folder == run / "export"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    config: Any = OmegaConf.load(run / "config.yaml")
    expected = ModelSource(architecture=plain(config.model.architecture)).build()
    expected.load_state_dict(state_of(run))
    assert torch.equal(logits(loaded), logits(expected))
    again = run_export(f"ckpt_path={checkpoint_of(run)}", "dtype=bf16")  # an export is replaced
    assert AutoModelForCausalLM.from_pretrained(again).dtype == torch.bfloat16


def test_the_tokenizer_of_the_run_goes_along(run: Path, tmp_path: Path) -> None:
    config: Any = OmegaConf.load(run / "config.yaml")
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    target = "roundpipe_lightning.modules.TokenizerSource"
    config.data.tokenizer = {"_target_": target, "name": None, "chat_template": str(template)}
    OmegaConf.save(config, run / "config.yaml")
    typed = f"++data.tokenizer.chat_template={template}"
    tokenizer = AutoTokenizer.from_pretrained(run_export(f"ckpt_path={checkpoint_of(run)}", typed))
    message = {"role": "user", "content": "One?"}
    assert tokenizer.apply_chat_template([message], tokenize=False) == "One?"
    assert tokenizer.decode(tokenizer("One?").input_ids) == "One?"


def test_the_file_of_sentencepiece_goes_along(run: Path, tmp_path: Path) -> None:
    TokenizerSource().load().save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "tokenizer.model").write_bytes(b"pieces")
    config: Any = OmegaConf.load(run / "config.yaml")
    target = "roundpipe_lightning.modules.TokenizerSource"
    config.data.tokenizer = {"_target_": target, "name": str(tmp_path / "mine")}
    OmegaConf.save(config, run / "config.yaml")
    typed = f"++data.tokenizer.name={tmp_path / 'mine'}"
    folder = run_export(f"ckpt_path={checkpoint_of(run)}", typed)
    assert (folder / "tokenizer.model").read_bytes() == b"pieces"
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.suite("memory")
@pytest.mark.parametrize("frozen_weights", ["memory", "mmap"])
def test_an_adapter_of_a_run(tmp_path: Path, frozen_weights: str) -> None:
    tiny: Any = OmegaConf.load(config_folder() / "model" / "tiny.yaml")
    base = ModelSource(architecture=plain(tiny.architecture)).build()
    base.save_pretrained(tmp_path / "base")
    run = tmp_path / "run"
    train_small(
        run,
        f"model.hub_name={tmp_path / 'base'}",
        "model.weights=pretrained",
        f"model.frozen_weights={frozen_weights}",
        "peft=lora",
        "peft.r=2",
        "optimizer.lr=0.1",
    )
    checkpoint = (f"ckpt_path={checkpoint_of(run)}", f"++model.hub_name={tmp_path / 'base'}")
    adapter = run_export(*checkpoint)
    assert (adapter / "adapter_config.json").is_file()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter
    )
    assert not torch.equal(logits(loaded), logits(base))
    changed = ("merge=true", "+model.frozen_weights=mmap")
    merged = run_export(*checkpoint, *changed, f"output_dir={tmp_path / 'merged'}")
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert torch.equal(logits(whole), logits(loaded.merge_and_unload()))


def test_an_adapter_on_a_quantised_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    overrides = ("peft=lora", "peft.r=2", "peft.frozen_bits=4", "trainer.precision=bf16-true")
    train_small(run, *overrides, "model.dtype=bfloat16")
    saved = torch.load(checkpoint_of(run), weights_only=True)
    assert all("lora_" in name for name in saved["state_dict"])
    adapter = run_export(f"ckpt_path={checkpoint_of(run)}")
    assert (adapter / "adapter_config.json").is_file()
    merged = run_export(f"ckpt_path={checkpoint_of(run)}", "merge=true")
    whole = AutoModelForCausalLM.from_pretrained(merged)
    weight = whole.model.layers[0].mlp.up_proj.weight  # has no adapter
    assert weight.dtype == torch.bfloat16
    assert 8 < len(weight.flatten()[:64].unique()) <= 16
    monkeypatch.setattr("roundpipe_lightning.engine.device.host_memory.free_host_bytes", lambda: 99)
    with pytest.raises(FitError, match=r"The base, which is drawn anew, needs .* of host memory"):
        run_export(f"ckpt_path={checkpoint_of(run)}", "merge=true")


def test_published_weights_in_the_models_own_layout(tmp_path: Path) -> None:
    save(tmp_path / "published", EXPERTS)
    model = [
        "model=tiny",
        "model.weights=pretrained",
        f"model.hub_name={tmp_path / 'published'}",
    ]
    folder = run_export(*model, "original_layout=false", f"output_dir={tmp_path / 'own'}")
    mapped = ModelSource(
        architecture={}, hub_name=str(folder), weights="pretrained", frozen_weights="mmap"
    ).build()
    assert mapped.state_dict() == {}  # a warning would say that some are not mapped


def test_the_checkpoint_of_another_model(run: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        run_export(
            f"ckpt_path={checkpoint_of(run)}",
            "model=tiny",
            "model.architecture.num_hidden_layers=1",
            "model.architecture.hidden_size=16",
            "model.architecture.intermediate_size=48",
        )
    message = str(raised.value)
    assert "of another model than CausalLanguageModule is here: 14 tensors do not fit" in message
    assert "extra: model.model.layers.1" in message
    assert not (run / "export").exists()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["ckpt_path={alone}"], ConfigurationError, r"is in no folder of a run"),
        (["model=tiny"], ConfigurationError, r"ckpt_path=null: name a checkpoint"),
        (
            ["ckpt_path={good}", "output_dir=s3://x"],
            ConfigurationError,
            r"a folder on this machine",
        ),
        (["model=tiny", "output_dir=out"], ConfigurationError, r"model\.weights=random has none"),
        (["ckpt_path=none.ckpt"], CheckpointError, r"none\.ckpt.*does not exist"),
        (["ckpt_path={good}", "dtype=int8"], ConfigurationError, r"dtype='int8'"),
        (["ckpt_path={good}", "max_shard_bytes=5GB"], ConfigurationError, r"=5GB must be a number"),
        (["ckpt_path={good}", "tokenizer={run}"], ModelSourceError, r"none of the files of a tok"),
        (["ckpt_path={good}", "tokenizer=/no"], ModelSourceError, r"^tokenizer='/no' is neither"),
        (["ckpt_path={good}", "merge=maybe"], ConfigurationError, r"merge='maybe': set true or"),
        (
            ["ckpt_path={good}", "output_dir={run}"],
            CheckpointError,
            r"no earlier export",
        ),
        (["ckpt_path={good}", "+peft.r=3"], ConfigurationError, r"^peft\.r=.* has no peft that"),
        (["ckpt_path={short}"], CheckpointError, r"short\.ckpt"),
        (["ckpt_path={other}"], CheckpointError, r"is no checkpoint of Lightning"),
        (["ckpt_path={hub}"], CheckpointError, r"is a folder of Hugging Face, not a checkpoint"),
    ],
)
def test_refuses_what_cannot_be_exported(
    run: Path, tmp_path: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    good = checkpoint_of(run)
    paths = {"alone": tmp_path / "alone.ckpt", "good": good, "run": run}
    paths |= {name: good.with_name(f"{name}.ckpt") for name in ("short", "other")}
    shutil.copy(good, paths["alone"])
    paths["hub"] = tmp_path / "hub"  # and no run is beside it
    paths["hub"].mkdir()
    (paths["hub"] / "config.json").touch()
    paths["short"].write_bytes(good.read_bytes()[:-3000])
    torch.save({"weights": torch.zeros(2)}, paths["other"])
    with pytest.raises(error, match=message):
        run_export(*(override.format(**paths) for override in overrides))


def test_the_command(run: Path, tmp_path: Path) -> None:
    done = run_program(roundpipe_commands.export, tmp_path, f"ckpt_path={checkpoint_of(run)}")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / MARKER).is_file()
    done = run_program(roundpipe_commands.export, tmp_path, "ckpt_path=none.ckpt")
    assert done.returncode == 2, done.stderr
    assert "Error: ckpt_path='none.ckpt' does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_export_has_a_card_and_goes_to_the_hub(run: Path) -> None:
    with hub(run / "cache") as server:
        folder = run_export(f"ckpt_path={checkpoint_of(run)}", "push_to_hub=me/mine")
    files = server.repositories["me/mine"]
    assert set(files) == {path.name for path in folder.iterdir()}
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "| Training | 3 steps of 4 microbatches on 4 workers |" in card
    assert "vllm serve me/mine" in card
    assert (
        "hf download me/mine --local-dir mine\n# with transformers 5, not with the 4.57 of "
        "llama.cpp's requirements.txt\n"
        "python llama.cpp/convert_hf_to_gguf.py mine" in card
    )
    assert str(run.parent) not in card
    plan = json.loads((run / "plan.json").read_text())
    assert f"{plan['num_microbatches']} microbatches, 4 workers" in card


def test_the_card_of_an_adapter_names_its_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_small(run, "peft=lora", "peft.r=16", "callbacks=export", "trainer.max_steps=1")
    config: Any = OmegaConf.load(run / "config.yaml")
    config.model.hub_name = "Qwen/Qwen3-0.6B"
    OmegaConf.save(config, run / "config.yaml")
    settings = json.loads((run / "export" / "adapter_config.json").read_text())

    def card(**changes: Any) -> str:
        (run / "export" / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
        write_card(run / "export", run)
        return (run / "export" / "README.md").read_text()

    assert "base_model: Qwen/Qwen3-0.6B" in card()
    for changes in ({}, {"r": 12}, {"r": 4, "rank_pattern": {"q_proj": 10}}):
        assert "--enable-lora --max-lora-rank 16 --lora-modules export=." in card(**changes)
    unserved: list[dict[str, Any]] = [{"use_dora": True}, {"use_rslora": True}, {"bias": "all"}]
    unserved += [{"init_lora_weights": "pissa_niter_4"}, {"alpha_pattern": {"q_proj": 3}}]
    for changes in (*unserved, {"peft_type": "IA3"}, {"r": 600}):
        refused = card(**changes)
        assert "with another scale" in refused
        assert "vllm serve" not in refused
    assert "hf download Qwen/Qwen3-0.6B --local-dir base\n" in card(r=16)
    config.model.hub_name = str(tmp_path)
    OmegaConf.save(config, run / "config.yaml")
    assert f"ln -s /path/to/{tmp_path.name} base\n" in card(r=16)
    assert f"vllm serve /path/to/{tmp_path.name} --enable-lora" in card()
    config.module._target_ = "roundpipe_lightning.modules.RewardModule"
    OmegaConf.save(config, run / "config.yaml")
    assert "`AutoModelForSequenceClassification` loads it" in card()


def test_a_hub_that_refuses_is_explained_before_anything_is_written(run: Path) -> None:
    message = r"push_to_hub='me/mine': .*401.* log in with a token that may write"
    with hub(run / "cache", token="hf_other"), pytest.raises(ModelSourceError, match=message):
        run_export(f"ckpt_path={checkpoint_of(run)}", "push_to_hub=me/mine")
    with no_hub(run / "cache"), pytest.raises(ModelSourceError, match=r"'me/mine': .*refused"):
        run_export(f"ckpt_path={checkpoint_of(run)}", "push_to_hub=me/mine")
    assert not (run / "export").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_command_takes_memory_for_what_is_in_files(tmp_path: Path) -> None:
    """Their peaks, as parts of the size of the model; a resumed training's beyond a new one's."""
    script = """
        import json, sys
        from pathlib import Path
        import roundpipe_commands as commands
        from benchmarks.forked import answer_of
        from benchmarks.memory_truth import Peak

        def peak(name, *words):
            sys.argv[1:] = words
            with Peak() as peak:
                commands.merge(words) if name == "merge" else getattr(commands, name)()
            return peak.num_bytes - peak.before

        train = [*sys.argv[1:], "checkpoint=distributed"]
        peak("train", *train, "model.architecture.hidden_size=16", "peft=lora", "hydra.run.dir=0")
        peak("export", "ckpt_path=0/checkpoints/last.ckpt")  # both for what they import
        new = answer_of(peak, "train", *train, "hydra.run.dir=new", seconds=200)
        last = Path("new/checkpoints/last.ckpt")
        cases = {"merge": ("merge", str(last), "new/one.ckpt")}
        for name, file in ("folder", last), ("file", "new/one.ckpt"):
            cases[name] = ("export", "dtype=bf16", f"output_dir={name}", f"ckpt_path={file}")
        more = ("trainer.max_steps=3", "hydra.run.dir=more", "ckpt_path=new/one.ckpt")
        cases["resume"] = ("train", *train, *more)
        peaks = {name: answer_of(peak, *case, seconds=200) for name, case in cases.items()}
        peaks["resume"] -= new
        size = sum(file.stat().st_size for file in Path("folder").glob("*.safetensors"))
        print(json.dumps({name: value / (2 * size) for name, value in peaks.items()}))
    """
    size = ("num_hidden_layers=24", "hidden_size=512", "intermediate_size=1024")
    large = [word for word in SMALL if not word.startswith("model.") and "max_steps" not in word]
    large += [f"model.architecture.{figure}" for figure in size]
    large += [
        "trainer.max_steps=2",
        "trainer.devices=1",
        "callbacks=minimal",
        "logger=none",
        "validate=false",
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *large, "optimized_metric=null"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(peaks.values()) < 0.3, peaks
