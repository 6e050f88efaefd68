"""The README.md of an exported folder: where the model comes from, and how it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from roundpipe_lightning.cli.summary import summary_rows
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.schedule.plan import Plan

_SERVE_MODEL = """\
```bash
vllm serve {folder}

python llama.cpp/convert_hf_to_gguf.py {folder} --outfile model.gguf --outtype q8_0
llama-server -m model.gguf

echo 'FROM ./model.gguf' > Modelfile
ollama create {name} -f Modelfile && ollama run {name}
```"""

_SERVE_ADAPTER = """\
```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={folder}

hf download {base} --local-dir base
python llama.cpp/convert_hf_to_gguf.py base --outfile base.gguf --outtype q8_0
python llama.cpp/convert_lora_to_gguf.py {folder} --base base --outfile adapter.gguf
llama-server -m base.gguf --lora adapter.gguf

printf 'FROM ./base.gguf\\nADAPTER ./adapter.gguf\\n' > Modelfile
ollama create {name} -f Modelfile && ollama run {name}
```

`roundpipe-export merge=true` merges the adapter into its base, which needs no base beside it."""


def write_card(folder: Path, run: Path, *, name: str | None = None) -> None:
    """Write `README.md` into an exported folder, from the files of the run.

    Paths of this machine are left out, since the folder is made to be published.

    Args:
        folder: The export.
        run: The run's folder, with `config.yaml`; `summary.json` and `plan.json` where they are.
        name: Of the model on the hub; None: the folder.
    """
    config: Any = OmegaConf.load(run / "config.yaml")
    adapter = folder / "adapter_config.json"
    settings = json.loads(adapter.read_text("utf-8")) if adapter.is_file() else None
    base = _public(config.model.get("hub_name"))
    header = {"library_name": "transformers" if settings is None else "peft"}
    if base and "/" in base:
        header["base_model"] = base
    if not config.module["_target_"].endswith(("ClassificationModule", "RewardModule")):
        header["pipeline_tag"] = "text-generation"
    serve = _SERVE_MODEL if settings is None else _SERVE_ADAPTER
    title = (name or folder.resolve().name).rpartition("/")[2]
    rows = [
        ("Base", base or "random weights"),
        ("Learned", config.module["_target_"].rpartition(".")[2]),
        ("Data", ", ".join(_names(config.data.get("files"))) or config.data["_target_"]),
        *_figures(run),
        *(
            (key, str(OmegaConf.select(config, key)))
            for key in ("data.seq_len", "data.batch_size", "optimizer.lr", "trainer.precision")
        ),
    ]
    lines = [
        "---",
        *(f"{key}: {value}" for key, value in header.items()),
        "tags: [roundpipe_lightning]",
        "---",
        f"# {title}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows),
        *_plan(run / "plan.json"),
        "",
        "## Serve it",
        "",
        serve.format(
            folder=name or ".",
            name=title,
            base=base or "BASE",
            rank=max(8, (settings or {}).get("r") or 8),
        ),
    ]
    write_text(folder / "README.md", "\n".join(lines) + "\n")


def _figures(run: Path) -> list[tuple[str, str]]:
    summary = run / "summary.json"
    return summary_rows(json.loads(summary.read_text("utf-8")), unit="") if summary.exists() else []


def _plan(path: Path) -> list[str]:
    try:
        plan = Plan.load(path)
    except PlanError:  # the run was not one of round-robin workers, or of another version
        return []
    text = f"{plan.partition}, {plan.num_microbatches} microbatches, {plan.num_workers} workers"
    return ["", "## The plan it was trained by", "", f"```text\n{text}\n```"]


def _names(files: Any) -> list[str]:
    given = [files] if isinstance(files, str) else list(files or ())
    return [_public(str(file)) or "" for file in given]


def _public(name: str | None) -> str | None:
    """A hub name as it is; of a path of this machine the last part."""
    return name if name is None or not Path(name).exists() else Path(name).name
