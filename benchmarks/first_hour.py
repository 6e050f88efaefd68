"""What a new user meets in the first hour: every form of file, every command, and bad input.

The files are written here, the model is tiny, and nothing is downloaded. A command is a process
that is forked when all has been imported: seconds are saved for each. Exit status 1: a command
ended in a traceback, or otherwise than expected.  python benchmarks/first_hour.py [WORDS OF CASES]
"""

import gzip
import importlib
import io
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")
_SMALL = "data.batch_size=2 data.seq_len=128 trainer.max_steps=2 scheduler.num_warmup_steps=0"
_SMALL += " trainer.val_check_interval=null"
_PROGRAMS = ("train", "plan.command", "data", "checkpoints")

# Commands, each with words of what it prints. Those of training and data also take `_SMALL`.
WORKS = {
    "data data=chats.jsonl": "(messages)", "data data=chats.jsonl.gz": "(messages)",
    "data data=chats.parquet": "(messages)", "data data=parts.jsonl": "[[Y|e|s|<|im_end|>]]",
    "data data=flags.jsonl": "(43 tokens, 4 of them learned", "data data=shared.json": "(ShareGPT)",
    "data data=alpaca.json": "(32 tokens, 2 of them learned", "data data=texts.jsonl": "(texts)",
    "data data=own.jsonl 'data.fields={prompt: ask, completion: reply}'": "(prompt/completion)",
    "data data=sums.csv": "[[1|<|im_end|>]]", "data experiment=dpo data=pairs.jsonl": "rejected:",
    "data 'data={chats.jsonl: 2, alpaca.json: 0.5}'": "91 samples",
    "plan recipe=qwen3_32b/lora hardware=rtx4090x4": "It fits.",
    "train data=chats.jsonl": "Everything is",
    "train data=chats.jsonl trainer.max_steps=3 ckpt_path=last": "Everything is",
    "train recipe=qwen3_0_6b/lora model=tiny model.weights=random data=alpaca.json": "Everything",
    "train data=shared.json peft=lora": "lora:", "chat last --max-new-tokens 4": ">",
    "export ckpt_path=last output_dir=adapter": "adapter",
    "export ckpt_path=last output_dir=merged merge=true": "merged",
    "chat merged --max-new-tokens 4": ">", "train experiment=dpo data=pairs.jsonl": "val_margin",
    "train experiment=dpo data=pairs.jsonl module=orpo": "val_margin",
    "train experiment=dpo data=pairs.jsonl module=reward": "val_margin",
    "train experiment=dpo data=judged.jsonl module=kto": "val_kl",
    "data module=kto data=judged.jsonl": "a wanted answer:",
    "finetune merged chats.jsonl": "Model: ",
}  # fmt: skip
REFUSED = {
    "data data=unknown.jsonl": "line 1: the fields 'instr", "data data=latin.jsonl": "line 1: this",
    "data data=mixed.jsonl": "line 3: this record is Alp", "data data=chat.jsonl": "'chat.jsonl'",
    "data data=empty.jsonl": "line 2: message 2", "data data=nothing.jsonl": "nothing.jsonl: there",
    "data data=empty.json": "item 2: the field", "data data=silent.jsonl": "silent.jsonl: there is",
    "chat no/thing": "no/thing", "data experiment=dpo data=equal.jsonl": "equal.jsonl, line 1: ",
    "data data=empty.csv": "line 3: the field", "train data=chats.jsonl model=no/thing": "no/thing",
    "data data=none.xlsx": "'none.xlsx'", "train data=pairs.jsonl": "line 1: this is pref",
    "data data=long.jsonl": "line 1: the sample", "train recipe=qwen3_32b/lorra": "qwen3_32b/lora",
    "data data=broken.json": "line 1, item 40", "data data=image.jsonl": "line 1: message 2",
    "data data=broken.jsonl": "line 2: this is", "data data=none.jsonl.gz": "none.jsonl.gz: ",
    "data data=loop.jsonl": "'loop.jsonl'", "finetune merged chat.jsonl": "'chat.jsonl'",
    "data data=role.jsonl": "line 1: message 1", "data data=cut.jsonl.gz": "cut.jsonl.gz: ",
    "data data=none.parquet": "none.parquet: ", "data data=no/thing": "'no/thing'",
    "data data=chats.jsonl data.tokenizer.name=plain": "data.tokenizer.chat_template",
    "train experiment=dpo data=chats.jsonl": "line 1: this is mess",
    "train data=flags.jsonl data.batch_size=8": "data.batch_size",
    "train data=chats.jsonl data.seq_len=9999": "data.seq_len", "train optimiser.lr=1": "optimizer",
    "export ckpt_path=no.ckpt": "no.ckpt", "data 'data={chats.jsonl: often}'": "weight of chats",
    "data data=deep.json": "line 1: this is not", "data data=null.jsonl": "'completion' is null",
    "data data=unwanted.jsonl": "line 1: this answer", "train recipe=qwen3_8b": "qwen3_8b/lora",
    "data module=classification data=texts.jsonl": "data.classes=", "chat plain": "config.json",
}  # fmt: skip
OFFLINE = {  # refused, too
    "data data=no/where": "'no/where'", "train data=chats.jsonl model=no/where": "no/where",
}  # fmt: skip


def write_files(folder: Path) -> None:
    """Write the files that the cases read."""
    from pyarrow import Table, parquet

    from roundpipe_lightning.modules.source import byte_level_tokenizer

    def chat(question: str, answer: Any, role: str = "user") -> dict[str, Any]:
        said = [{"role": role, "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": said[: 1 + (answer is not None)]}

    sums = [(f"{i}+1?", str(i + 1)) for i in range(40)]
    chats, untrained = [chat(*each) for each in sums], chat("0+1?", "Yes")
    untrained["messages"].insert(0, {"role": "assistant", "content": "No", "train": False})
    pairs = [{"prompt": q, "chosen": a, "rejected": "no"} for q, a in sums]
    judged = [{"prompt": q, "completion": a, "label": True} for q, a in sums]
    alpaca = [{"instruction": "Add.", "input": q, "output": a} for q, a in sums]
    shared = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in sums]
    packed = gzip.compress("".join(json.dumps(each) + "\n" for each in chats).encode())
    files: dict[str, Any] = {
        "chats.jsonl": chats, "pairs.jsonl": pairs, "judged.jsonl": judged,
        "flags.jsonl": [untrained] * 4, "null.jsonl": [{"prompt": "?", "completion": None}],
        "own.jsonl": [{"ask": q, "reply": a} for q, a in sums], "deep.json": "[" * 99_999,
        "unwanted.jsonl": [{**judged[0], "label": False}] * 4,
        "texts.jsonl": [{"text": q * 9} for q, _ in sums], "mixed.jsonl": [*chats[:2], alpaca[0]],
        "parts.jsonl": [chat("Well?", [{"type": "text", "text": "Yes"}])] * 4, "nothing.jsonl": "",
        "unknown.jsonl": [{"instructions": "Add.", "outputs": "1"}], "none.jsonl.gz": "none",
        "empty.jsonl": [chats[0], chat("?", "")], "role.jsonl": [chat("?", "a", "robot")],
        "silent.jsonl": [chat("?", None)] * 4, "image.jsonl": [chat("?", [{"type": "image_url"}])],
        "equal.jsonl": [{**pairs[0], "rejected": "1"}] * 4, "long.jsonl": [chat("a" * 200, "b")],
        "broken.jsonl": json.dumps(chats[0]) + "\n{'messages': 1}\n", "none.parquet": "none",
        "alpaca.json": json.dumps(alpaca), "broken.json": json.dumps(alpaca)[:-9],
        "empty.json": json.dumps([alpaca[0], {**alpaca[1], "output": ""}]),
        "shared.json": json.dumps([{"conversations": each} for each in shared]),
        "sums.csv": "prompt,completion\n" + "0+1?,1\n" * 40, "latin.jsonl": b'{"text": "\xe9"}',
        "empty.csv": "prompt,completion\n0+1?,1\n1+1?,\n",
        "chats.jsonl.gz": packed, "cut.jsonl.gz": packed[:-20],
    }  # fmt: skip
    for name, held in files.items():
        raw = "".join(json.dumps(x) + "\n" for x in held) if isinstance(held, list) else held
        (folder / name).write_bytes(raw.encode() if isinstance(raw, str) else raw)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")  # root reads what has no rights
    parquet.write_table(Table.from_pylist(chats), folder / "chats.parquet")
    plain = byte_level_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(folder / "plain")


class EmptyHub(BaseHTTPRequestHandler):
    """Has nothing, whatever is asked for."""

    def do_GET(self) -> None:
        """Answer as the hub does about what is not there, or not yours."""
        self.send_response(401)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Say nothing on the screen."""


def start(name: str, words: list[str], folder: Path, output: int) -> None:
    """Become a command, in a process of its own."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.argv, sys.stdin = [name, *words], io.StringIO("1+1?\n")
    if name == "finetune":
        try:
            print(rl.finetune(*words, overrides=_SMALL.split()))
        except rl.errors.RoundPipeError as error:
            sys.exit(print("Error:", error) or 2)
    else:
        sys.exit(getattr(roundpipe_commands, name)())


def run(command: str, folder: Path) -> tuple[int, str]:
    """Exit status and output of a command."""
    name, *words = shlex.split(command)
    words = [*(_SMALL.split() if name in {"train", "data"} else []), *words]
    with tempfile.TemporaryFile() as output:
        process = _FORK.Process(target=start, args=(name, words, folder, output.fileno()))
        process.start()
        process.join()
        output.seek(0)
        return process.exitcode or 0, output.read().decode()


def play(folder: Path, hub: multiprocessing.process.BaseProcess, asked: str) -> int:
    """Run the cases with these words in them; return how many ended otherwise than expected."""
    faults = 0
    for line, wanted in {**WORKS, **REFUSED, **OFFLINE}.items():
        if asked not in line:
            continue
        if line in OFFLINE:
            hub.kill()
            hub.join()
        began = time.monotonic()
        status, output = run(line, folder)
        end = output if line in WORKS else f"\n{output}".rpartition("\nError: ")[2].strip()
        fine = status == (0 if line in WORKS else 2) and wanted in end
        fine = fine and "Traceback (most" not in output and (line in WORKS or "\n" not in end)
        said = [each for each in end.splitlines() if wanted in each] if fine else [output[-900:]]
        faults += not fine
        verdict = f"{'ok' if fine else 'FAULT'} {status}, {time.monotonic() - began:.1f} s"
        print(f"{verdict}  {line}\n    {said[-1]}", flush=True)
    return faults


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyHub)
    hub = _FORK.Process(target=server.serve_forever, daemon=True)
    hub.start()
    with tempfile.TemporaryDirectory() as made:
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        os.environ["HF_HOME"] = f"{made}/hf"
        server.server_close()
        import roundpipe_commands
        import roundpipe_lightning as rl

        for each in _PROGRAMS:
            importlib.import_module(f"roundpipe_lightning.cli.{each}")
        writer = _FORK.Process(target=write_files, args=(Path(made),))
        writer.start()
        writer.join()
        faults = play(Path(made), hub, " ".join(sys.argv[1:]))
    print(f"{faults} faults")
    sys.exit(int(faults > 0))
