"""What the peer's tests take from transformers 4 or the network, on local files.

transformers 5 has no GlueDataset and no GlueDataTrainingArguments, and datasets 5 runs no loading
scripts; tokenizers and image processors of the Hub are not at hand. None of it concerns adapters.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

# of the models that the peer's tests name, only these have segments
_WITH_SEGMENTS = ("bert", "albert", "electra", "xlnet")
# tokenizers whose numbers the tests use to the size of their vocabulary
_VOCABULARY = {"openai/whisper-small": 51865}
# data sets of recordings, whose files a checkout may lack, to the number of labels of one
_AUDIO = {"common_voice_encoded": 12, "speech_commands_encoded": 1}


@dataclasses.dataclass
class GlueDataTrainingArguments:
    """The fields that the tests set."""

    task_name: str
    data_dir: str
    max_seq_length: int = 128
    overwrite_cache: bool = False


@dataclasses.dataclass(frozen=True)
class InputFeatures:
    """One tokenized pair of sentences."""

    input_ids: list[int]
    attention_mask: list[int]
    token_type_ids: list[int] | None
    label: int


def install(fixtures: Path) -> None:
    """Give transformers and datasets what the peer's tests ask of them."""
    # AdapterTrainer imports what makes transformers replace its own entry in sys.modules
    importlib.import_module("transformers.trainer")
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")

    class GlueDataset(list[InputFeatures]):
        """The few pairs of MRPC that the peer keeps, tokenized."""

        def __init__(self, args: GlueDataTrainingArguments, tokenizer: Any, mode: str = "train"):
            self.args = args
            file = fixtures / "samples" / "MRPC" / f"{mode}.tsv"
            with file.open(encoding="utf-8-sig") as lines:
                rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
            super().__init__(_features(row, tokenizer, args.max_seq_length) for row in rows)

        def get_labels(self) -> list[str]:
            return ["0", "1"]

    transformers.GlueDataset = GlueDataset
    transformers.GlueDataTrainingArguments = GlueDataTrainingArguments
    transformers.AutoFeatureExtractor = transformers.ViTImageProcessor = _ImageProcessor
    load_tokenizer = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name: str, *arguments: Any, **options: Any) -> Any:
        options.pop("use_fast", None)
        if Path(name).is_dir():
            return load_tokenizer(name, *arguments, **options)
        tokenizer = load_tokenizer(str(fixtures / "SiBERT"), *arguments, **options)
        tokenizer.add_special_tokens({"eos_token": "[SEP]", "bos_token": "[CLS]"})
        missing = _VOCABULARY.get(name, 0) - len(tokenizer)
        tokenizer.add_tokens([f"<{number}>" for number in range(missing)])
        if not name.startswith(_WITH_SEGMENTS):
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        return tokenizer

    transformers.AutoTokenizer.from_pretrained = from_pretrained
    load_dataset = datasets.load_dataset

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        if Path(path).name == "cifar10":
            return _cifar10(fixtures)
        return load_dataset(path, *arguments, **options)

    datasets.load_dataset = load
    load_from_disk = datasets.load_from_disk

    def from_disk(path: str, *arguments: Any, **options: Any) -> Any:
        labels = _AUDIO.get(Path(path).name)
        if labels is None:
            return load_from_disk(path, *arguments, **options)
        return _audio(labels)

    datasets.load_from_disk = from_disk
    transformers.CLIPConfig.from_text_vision_configs = classmethod(_of_two_configs)
    # every config of transformers 4 has one
    transformers.CLIPConfig.eos_token_id = None


def _features(row: list[str], tokenizer: Any, length: int) -> InputFeatures:
    encoded = tokenizer(row[3], row[4], max_length=length, padding="max_length", truncation=True)
    segments = encoded.get("token_type_ids")
    return InputFeatures(encoded["input_ids"], encoded["attention_mask"], segments, int(row[0]))


def _of_two_configs(cls: Any, text: Any, vision: Any, **options: Any) -> Any:
    """A config of CLIP from those of its parts, as transformers 4 makes it."""
    return cls(text_config=text.to_dict(), vision_config=vision.to_dict(), **options)


def _audio(labels: int) -> Any:
    """Ten recordings of noise, as Whisper reads them, with as many labels each."""
    import datasets
    import numpy as np

    draw = np.random.default_rng(0)
    rows = {
        "input_features": draw.standard_normal((10, 80, 3000), dtype=np.float32),
        "labels": draw.integers(1, 3, (10, labels)),
    }
    features = datasets.Features(
        {
            "input_features": datasets.Array2D((80, 3000), "float32"),
            "labels": datasets.List(datasets.Value("int64")),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    return datasets.DatasetDict({"train": made.with_format("torch")})


class _ImageProcessor:
    """Scales images to 224 × 224; stands for the image processors of the Hub."""

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> _ImageProcessor:
        return cls()

    def __call__(self, images: Any, return_tensors: str = "pt") -> dict[str, Any]:
        import numpy as np
        import torch
        from PIL import Image

        def to_pil_image(pixels: Any) -> Any:
            return Image.fromarray(pixels.permute(1, 2, 0).numpy())  # [height, width, 3]

        images = images if isinstance(images, list) else [images]
        images = [to_pil_image(i) if isinstance(i, torch.Tensor) else i for i in images]
        scaled = [np.asarray(image.resize((224, 224)), dtype=np.float32) for image in images]
        pixels = torch.from_numpy(np.stack(scaled)) / 127.5 - 1
        return {"pixel_values": pixels.permute(0, 3, 1, 2)}  # [batch, 3, 224, 224]


def _cifar10(fixtures: Path) -> Any:
    """The images of the fixture's first batch, with their labels."""
    import datasets
    import numpy as np
    from PIL import Image

    file = fixtures / "samples" / "cifar10" / "data_batch_1"
    batch = pickle.loads(file.read_bytes(), encoding="bytes")
    pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    images = [Image.fromarray(each.transpose(1, 2, 0)) for each in pixels]
    return datasets.Dataset.from_dict(
        {"img": images, "label": batch[b"labels"]},
        features=datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")}),
    )
