import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

import roundpipe_commands as commands
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.data import VisionDataModule
from roundpipe_lightning.data.vision import _image
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import ProcessorSource
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.programs import run_program
from tests.kit.runs import summary
from tests.kit.vision import write_image, write_seeing_model

pytest.importorskip("PIL", reason="Pillow is not installed here")

SOFT = "\n\n<start><soft><soft><soft><soft><end>\n\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_seeing_model(tmp_path / "model")
    write_image(tmp_path / "red.png", "red")
    write_image(tmp_path / "blue.png", "blue")
    return tmp_path


def asked(content: Any, **beside: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "Red."}
    return {"messages": [{"role": "user", "content": content}, answer], **beside}


def part(source: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "A "}, {"type": "image_url", "image_url": {"url": source}}]


def make(folder: Path, *records: Any, **options: Any) -> VisionDataModule:
    path = folder / "seen.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    settings = {"seq_len": 128, "batch_size": len(records), **options}
    return VisionDataModule(
        files=[str(path)],
        validation_files=[str(path)],
        tokenizer=ProcessorSource(name=str(folder / "model")),
        **settings,
    )


def test_images_in_parts_beside_messages_and_in_text_are_seen(folder: Path) -> None:
    encoded = base64.b64encode((folder / "red.png").read_bytes()).decode()
    data = make(
        folder,
        asked(part("red.png")),
        asked([{"type": "text", "text": "A "}, {"type": "image", "path": "red.png"}]),
        asked(part(str(folder / "red.png"))),
        asked(part(f"data:image/png;base64,{encoded}")),
        asked([{"type": "text", "text": "A "}, {"type": "image"}], images=["red.png"]),
        asked("A <image>b", images=["red.png"]),
        asked("A <image>and <image>", images=["red.png", "blue.png"]),
        asked("What?", image="red.png"),
        asked("None."),
    )
    data.setup()
    [batch] = data.val_dataloader()
    rows = [
        data.tokenizer.decode(ids[mask == 1])
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    said = ["A " + SOFT] * 5 + [f"A {SOFT}b", f"A {SOFT}and {SOFT}", f"{SOFT}What?", "None."]
    end = "<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>\n"
    assert rows == [f"<|im_start|>user\n{text}{end}" for text in said]
    learned = [data.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert learned == ["Red.<|im_end|>"] * 9
    assert batch["pixel_values"].shape == (9, 3, 16, 16)
    colours = batch["pixel_values"].mean(dim=(2, 3)).argmax(dim=1).tolist()
    assert colours == [0, 0, 0, 0, 0, 0, 0, 2, 0]
    assert (batch["token_type_ids"].sum(dim=1) == (batch["input_ids"] == 260).sum(dim=1)).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (asked(part("none.png")), r"the image '.*none\.png' cannot be read .*Mend or remove it"),
        (asked(part("seen.jsonl")), r"the image '.*seen\.jsonl' cannot be read"),
        (asked(part("cut.png")), r"the image '.*cut\.png' cannot be read"),
        (asked(part("data:image/png;base64,%%")), r"the image 'data:image/png;base64,%%' cannot"),
        (asked(part("https://a.b/c.png")), r"it is an address; download it and name the file"),
        (asked("<image><image>", images=["red.png"]), r"have 2 places of images, and .* has 1"),
        (asked([{"type": "video"}]), r"message 1 has a part of type 'video'"),
        (asked("word " * 60), r"more than data\.seq_len=128"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(folder: Path, record: Any, message: str) -> None:
    (folder / "cut.png").write_bytes((folder / "red.png").read_bytes()[:60])
    with pytest.raises(DataError, match=rf"seen\.jsonl, line 2: .*{message}"):
        make(folder, asked("No."), record).setup()


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [(1, None), (2, "FLIP_LEFT_RIGHT"), (3, "ROTATE_180"), (6, "ROTATE_90"), (8, "ROTATE_270")],
)
def test_a_turned_photo_is_seen_upright(tmp_path: Path, orientation: int, turn: str | None) -> None:
    from PIL import Image
    from transformers.image_utils import load_image

    upright = Image.new("RGB", (2, 3), "red")
    upright.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    stored = upright if turn is None else upright.transpose(getattr(Image.Transpose, turn))
    stored.save(path, exif=exif)
    raw = path.read_bytes()
    address = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    for source in (path, str(path), raw, {"bytes": raw}, address, Image.open(path)):
        assert _image(source, "p").tobytes() == load_image(str(path)).tobytes() == upright.tobytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"cannot be read \(it is no file\)"):
        _image(tmp_path / "a.png", "p")


def test_settings_and_models_that_cannot_see_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"too_long=cut_end would cut images"):
        make(folder, asked("No."), too_long="cut_end")
    write_seeing_model(folder / "model", "idefics3")
    with pytest.raises(ConfigurationError, match=r"Idefics3Processor\) does not tell"):
        make(folder, asked("No.")).setup()


@pytest.mark.parametrize("module", ["vision", "causal_lm"])
def test_a_plan_says_that_images_are_not_counted(folder: Path, module: str) -> None:
    words = ("hardware=cpu", "data.seq_len=128", "data.batch_size=2", f"module={module}")
    model = f"model={folder / 'model'}"
    own = ("partition.num_microbatches=2", "hydra.run.dir=run", model)
    done = run_program(commands.plan, folder, *words, *own)
    assert done.returncode == 0, done.stderr
    assert ("Not counted: images." in done.stdout) == (module == "vision")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Block .* runs on the whole batch:UserWarning")  # Llava's hooks
@pytest.mark.parametrize(
    ("family", "method"),
    [("gemma3", "vision"), ("llava", "vision"), ("gemma3", "lora"), ("gemma3", "full")],
)
def test_a_model_that_sees_trains_as_on_one_device(folder: Path, family: str, method: str) -> None:
    """Two steps of the recipe on a tiny model; rows have 0, 1 or 2 images, or are texts."""
    write_seeing_model(folder / "model", family)
    contents = [part("red.png"), part("blue.png"), part("red.png") + part("blue.png"), "No."]
    if method != "vision":
        contents = ["No.", "Never.", "What is it?", "What are they?"] * 4
    [path] = make(folder, *map(asked, contents * 3)).files.parts()
    losses = []
    for trainer in ("roundpipe", "single_device"):
        words = (
            f"recipe=gemma3_4b/{method}",
            "model=hub",
            f"model.hub_name={folder / 'model'}",
            f"data.files=[{path}]",
            f"trainer={trainer}",
            f"paths.output_dir={folder / trainer}",
            "hardware=cpu",
            "callbacks=export",
            "data.seq_len=128",
            "data.batch_size=4",
            "data.validation_share=0.3",
            *(() if method == "full" else ("peft=lora", "peft.lora_dropout=0")),
            "trainer.max_steps=2",
            "trainer.precision=32-true",
        )
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            train(compose("train", overrides=[*words, *_DEVICES[trainer]]))
        figures = summary(folder / trainer)
        losses.append([figures[name] for name in ("loss_first", "loss_last", "val_loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    files = {path.name for path in (folder / "roundpipe" / "export").iterdir()}
    assert ("processor_config.json" in files) == (method == "vision")


_DEVICES = {"roundpipe": ["trainer.devices=2", "partition.num_microbatches=2"], "single_device": []}
