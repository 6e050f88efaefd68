import json
import os
import pickle
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import roundpipe_commands
from roundpipe_lightning.checkpoint.io import Form, RoundPipeCheckpointIO
from roundpipe_lightning.cli.checkpoints import export
from roundpipe_lightning.cli.run_folder import SavedRun, claim, find_run, mark_run
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.source import byte_level_tokenizer
from tests.kit.programs import run_program
from tests.kit.runs import SMALL, composed, run_here, train_small
from tests.lightning.test_checkpoint import flip_bit


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_small(folder, "trainer.max_steps=1", "validate=false")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def plant(run: Path, key: str, value: Any) -> None:
    """Write a value into a run's settings, as somebody else might."""
    path = run / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    node = settings
    *groups, name = key.split(".")
    for group in groups:
        node = node.setdefault(group, {})
    node[name] = value
    path.write_text(yaml.safe_dump(settings))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def planted_code(folder: Path, marker: Path) -> Path:
    """A folder of a model and of a tokenizer whose code makes a marker, and a pickle that does."""
    folder.mkdir()
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "evil.py").write_text(
        f"import os; os.mkdir({str(marker)!r})\n"
        "from transformers import PreTrainedConfig\n"
        "class C(PreTrainedConfig):\n    model_type = 'evil'\n"
        "class M: pass\nclass T: pass\n"
    )
    (folder / "x.pkl").write_bytes(pickle.dumps(Bomb(marker)))
    return folder


OURS = "roundpipe_lightning.modules."
PLANTED: dict[str, tuple[str, Any]] = {
    "a trusted model": (
        "model",
        {
            "_target_": f"{OURS}ModelSource",
            "architecture": {},
            "hub_name": "{evil}",
            "weights": "pretrained",
            "trust_remote_code": True,
        },
    ),
    "a trusted tokenizer": (
        "data.tokenizer",
        {"_target_": f"{OURS}TokenizerSource", "name": "{evil}", "trust_remote_code": True},
    ),
    "options of a model": ("model.pretrained_options", {"trust_remote_code": True, "x": 1}),
    "a pickle": ("model", {"_target_": "torch.load", "f": "{evil}/x.pkl", "weights_only": False}),
    "a pickle of pandas": (
        "model",
        {"_target_": "pandas.read_pickle", "filepath_or_buffer": "{evil}/x.pkl"},
    ),
    "a removal": ("module", {"_target_": "shutil.rmtree", "path": "{evil}", "_partial_": False}),
    "a class in a list": (
        "model.unmatched_tensors",
        [{"_target_": "os.mkdir", "path": "{marker}"}],
    ),
    "a class in an architecture": (
        "model.architecture.x",
        {"_target_": "os.mkdir", "path": "{marker}"},
    ),
    "positions": ("model._args_", ["x"]),
    "a kernel of a repository": ("model.attention", "evil/kernel"),
    "a kernel in an architecture": ("model.architecture.attn_implementation", "evil/kernel"),
    "the environment": ("model.hub_name", "${oc.env:SECRET}"),
    "a template elsewhere": ("data.tokenizer.chat_template", "{evil}/evil.py"),
    "a module of peft": (
        "peft",
        {"_target_": "peft.LoraConfig", "megatron_config": {"a": 1}, "megatron_core": "evil"},
    ),
    "a tokenizer of peft": (
        "peft",
        {
            "_target_": "peft.PromptTuningConfig",
            "tokenizer_name_or_path": "{evil}",
            "tokenizer_kwargs": {"trust_remote_code": True},
        },
    ),
    "an adapter elsewhere": ("peft", {"_target_": "peft.LoraConfig", "adapter": "{evil}"}),
}


def filled(value: Any, **names: Path) -> Any:
    text = json.dumps(value)
    for name, path in names.items():
        text = text.replace(f"{{{name}}}", str(path))
    return json.loads(text)


@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_that_a_run_says_is_obeyed(
    run: Path, tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, output = tmp_path / "ran", tmp_path / "out"
    evil = planted_code(tmp_path / "evil", marker)
    monkeypatch.setenv("SECRET", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    key, value = PLANTED[planted]
    plant(run, key, filled(value, evil=evil, marker=marker))
    with pytest.raises(ConfigurationError, match=r"config\.yaml: .* type it again: ") as refused:
        export(composed("export", f"ckpt_path={run}", f"output_dir={output}"))
    assert "hf_secret" not in str(refused.value)
    done = run_program(lambda: roundpipe_commands.chat([str(run)]), tmp_path)
    assert "type it again" in done.stderr
    assert not marker.exists()
    assert evil.exists()
    assert not output.exists()


def test_what_is_typed_again_is_obeyed(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}!{% endfor %}")
    plant(run, "data.tokenizer", {"_target_": f"{OURS}TokenizerSource", "name": None})
    plant(run, "data.tokenizer.chat_template", str(template))
    words = (f"ckpt_path={run}", f"output_dir={tmp_path / 'out'}")
    done = run_program(roundpipe_commands.export, tmp_path, *words)
    assert done.returncode == 2
    again = done.stderr.rpartition("type it again: ")[2].strip()
    assert again == f"data.tokenizer.chat_template={template}"
    done = run_program(roundpipe_commands.export, tmp_path, *words, again)
    assert done.returncode == 0, done.stderr
    saved = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert saved == template.read_text()


def test_what_is_inside_the_folder_is_the_run_s(run: Path) -> None:
    byte_level_tokenizer().save_pretrained(run / "tokenizer")
    plant(run, "data.tokenizer", {"_target_": f"{OURS}TokenizerSource"})
    plant(run, "data.tokenizer.name", str(run / "tokenizer"))
    folder = export(composed("export", f"ckpt_path={run}"))
    assert (folder / "tokenizer.json").is_file()


OWN = """
from roundpipe_lightning.modules import CausalLanguageModule

class Focal(CausalLanguageModule):
    def __init__(self, source, *, gamma=1.0, **options):
        super().__init__(source, **options)
        print(f"gamma {gamma}")
"""


def test_a_class_of_ones_own_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    plant(run, "module", {"_target_": "stranger_module.Focal", "_partial_": True, "gamma": 2.5})
    words = (f"ckpt_path={run}", f"output_dir={tmp_path / 'out'}")
    done = run_program(roundpipe_commands.export, tmp_path, *words)
    assert done.returncode == 2
    assert "type it again: module._target_=stranger_module.Focal\n" in done.stderr
    done = run_program(
        roundpipe_commands.export, tmp_path, *words, "module._target_=stranger_module.Focal"
    )
    assert done.returncode == 0, done.stderr
    assert "gamma 2.5" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]\n", "names and values"),
        (b"a: [\n", "is not YAML"),
        (b"\xff\xfe\xfa", "is not UTF-8"),
        (b"a: " + b"[" * 3000 + b"]" * 3000, "levels deep"),
        (b"a: &a [1, 1]\nb: *a\n", r"has an alias \(\*a\)"),
        (b"a: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        (b"model: 3\n", "model has no class"),
        (b"x: " + b"y" * (5 << 20), "larger than the 4 MiB"),
    ],
)
def test_a_config_that_is_none_is_a_sentence(run: Path, content: bytes, message: str) -> None:
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"config\.yaml.*{message}"):
        export(composed("export", f"ckpt_path={run}"))


def test_a_run_is_known_by_its_own_file(run: Path, tmp_path: Path) -> None:
    """A `config.yaml` two folders up may be anybody's."""
    last = tmp_path / "shared" / "mine" / "last.ckpt"
    last.parent.mkdir(parents=True)
    shutil.copy(run / "checkpoints" / "last.ckpt", last)
    for name in ("config.yaml", "run.json"):
        shutil.copy(run / name, last.parents[1] / name)
    assert find_run(last) is None
    shutil.copy(run / "config.yaml", last.parent / "config.yaml")
    assert find_run(last) is None
    mark_run(last.parent)
    saved = find_run(last)
    assert saved is not None
    assert saved.folder == last.parent
    checkpoint = find_run(run / "checkpoints" / "last.ckpt")
    assert checkpoint is not None
    assert checkpoint.folder == run


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changes owners")
def test_a_run_of_somebody_else_is_not_the_checkpoint_s(run: Path) -> None:
    os.chown(run / "config.yaml", 12345, -1)
    assert find_run(run / "checkpoints" / "last.ckpt") is None


def test_a_card_shows_no_code(run: Path) -> None:
    plant(run, "model.hub_name", "x\n---\n; rm -rf ~")
    plant(run, "data.files", ["a|b\n# heading", "\x1b]0;title\x07"])
    assert SavedRun.read(run).line("model.hub_name") == "x --- ; rm -rf ~"
    (run / "summary.json").write_text("[]")
    words = ("model.hub_name=null", "data.tokenizer.name=null")
    with pytest.warns(UserWarning, match=r"summary\.json must have names and values"):
        folder = export(composed("export", f"ckpt_path={run}", *(f"++{word}" for word in words)))
    card = (folder / "README.md").read_text()
    assert "\x1b" not in card
    assert "; rm" not in card.partition("## Serve it")[2]
    assert "# heading" not in card.splitlines()


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".run.lock"
    script = (
        "import sys; from pathlib import Path\n"
        "from roundpipe_lightning.cli.run_folder import claim\n"
        "with claim(Path(sys.argv[1])):\n"
        "    print('has it', flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "run")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for ends in ("at its end", "killed"):
        with subprocess.Popen(words, **pipes) as holder:
            assert holder.stdout is not None
            assert holder.stdin is not None
            assert holder.stdout.readline() == "has it\n"
            message = rf"hydra\.run\.dir=.*run: the run of process {holder.pid} on .* writes this"
            with pytest.raises(ConfigurationError, match=message):
                train_small(tmp_path / "run")
            assert [path.name for path in (tmp_path / "run").iterdir()] == [".run.lock"]
            holder.kill() if ends == "killed" else holder.stdin.close()
            holder.wait(60)
        assert lock.exists() == (ends == "killed")
        with claim(tmp_path / "run"):
            assert f"process {os.getpid()} on" in lock.read_text()
        assert not lock.exists()


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    place = "hydra.run.dir=runs/${now:%Y}"
    for name in (f"{datetime.now(tz=timezone.utc):%Y}", "_2", "_3"):
        done = run_here(
            tmp_path, place, "trainer.max_steps=1", "callbacks=minimal", "validate=false"
        )
        assert done.stdout.strip().endswith(name)
    assert len(list((tmp_path / "runs").iterdir())) == 3
    run_here(tmp_path, place, "data.batch_size=0", status=2)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, but for the log and Hydra's own, which say that it was tried."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    logs = ("train.log", ".hydra")
    return {str(p): (folder / p).read_bytes() for p in paths if not str(p).startswith(logs)}


@pytest.mark.parametrize(
    "words",
    [
        ["model.architecture.hidden_size=32", "ckpt_path=run", "trainer.max_steps=3"],
        ["optimizer=sgd", "ckpt_path=run", "trainer.max_steps=3"],
        ["ckpt_path=run/none.ckpt"],
        ["data.batch_size=0"],
    ],
)
def test_a_resume_that_is_refused_changes_nothing(
    run: Path, tmp_path: Path, words: list[str]
) -> None:
    before = contents(run)
    run_here(tmp_path, "hydra.run.dir=run", *words, status=2)
    assert contents(run) == before


@pytest.mark.parametrize("form", ["file", "distributed"])
def test_checkpoints_are_looked_through(run: Path, tmp_path: Path, form: Form) -> None:
    checkpoints = run / "checkpoints"
    content = torch.load(checkpoints / "last.ckpt", weights_only=True)
    best = checkpoints / "best.ckpt"
    RoundPipeCheckpointIO(form=form).save_checkpoint(content, best)
    words = ("verify=true", f"ckpt_path={run}")
    done = run_program(roundpipe_commands.export, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    names = ("best", "last")
    whole = [f"{checkpoints / name}.ckpt: whole, after 1 steps" for name in names]
    assert done.stdout.splitlines() == whole
    flip_bit(best if form == "file" else next(best.glob("*.distcp")))
    done = run_program(roundpipe_commands.export, tmp_path, *words)
    assert done.returncode == 2
    damaged, last = done.stdout.splitlines()
    assert f"{best}: not whole. The checkpoint {best} cannot be read" in damaged
    assert last == whole[1]
    done = run_program(roundpipe_commands.export, tmp_path, words[0], f"ckpt_path={best}")
    assert done.returncode == 2
    assert done.stdout.splitlines() == [damaged]


def test_the_environment_is_not_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hf_secret")
    monkeypatch.setenv("STEPS", "1")
    folder = tmp_path / "run"
    config = composed(
        *("train", *SMALL, f"paths.output_dir={folder}", "validate=false"),
        "tags=['${oc.env:SECRET}','a ${oc.env:NONE,b}']",
    )
    config.trainer.max_steps = "${oc.decode:${oc.env:STEPS}}"
    train(config)
    assert config.tags == ["hf_secret", "a b"]
    for file in folder.rglob("*"):
        assert not file.is_file() or b"hf_secret" not in file.read_bytes()
    saved = SavedRun.read(folder)
    assert saved.value("tags") == ["${oc.env:SECRET}", "a ${oc.env:NONE,b}"]
    assert saved.value("trainer.max_steps") == "${oc.env:STEPS}"


ESCAPE = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J"


@pytest.mark.parametrize("kind", ["sample", "name", "line", "field"])
def test_nothing_of_data_is_obeyed_by_a_terminal(kind: str, tmp_path: Path) -> None:
    name = f"a{ESCAPE}.jsonl" if kind == "name" else "a.jsonl"
    text = ESCAPE if kind == "sample" else "x"
    messages = [{"role": role, "content": text} for role in ("user", "assistant")]
    content = json.dumps({"messages": messages})
    if kind == "line":
        content = f"{ESCAPE} no json"
    elif kind == "field":
        content = json.dumps({f"x{ESCAPE}": 1})
    (tmp_path / name).write_text(f"{content}\n" * 20)
    done = run_program(roundpipe_commands.data, tmp_path, "data=a*.jsonl")
    assert "\x1b]52" not in done.stdout + done.stderr
    if kind in ("sample", "name"):
        assert done.returncode == 0, done.stderr
        assert "\\x1b" in done.stdout
