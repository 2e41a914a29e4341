"""Base models in every quantization that transformers knows: real layers, else stand-ins.

`SCHEMES` has at least one entry for each key of transformers' `AUTO_QUANTIZER_MAPPING`. What needs
a GPU is replaced: by the layer of transformers with another kernel, or by a layer that stores what
the documentation of its library says and multiplies by what it unpacks.
"""

from __future__ import annotations

import functools
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from snapshots import bits, of_adapter
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

# kinds of a scheme
REAL, KERNEL, STAND_IN = "real", "real layer, stand-in kernel", "stand-in"
# blocks of 64 numbers have one scale in bitsandbytes' 4 bits
WIDTH = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip


class InPlace:
    """A scheme that replaces the layers of a model that is there, without transformers."""

    def __init__(self, convert: Callable[[nn.Module], None]) -> None:
        self.convert = convert

    @torch.no_grad()
    def load(self, cls: Any, folder: str, **settings: Any) -> Any:
        """Load the plain model, and convert it."""
        model = cls.from_pretrained(folder, **settings)
        self.convert(model)
        return model


def layers(made: Callable[[nn.Linear], nn.Module]) -> InPlace:
    """A scheme that makes one layer of another; the layers of a head stay."""

    def convert(model: nn.Module) -> None:
        for path, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear) and path not in ("classifier", "lm_head"):
                model.set_submodule(path, made(layer).requires_grad_(False))

    return InPlace(convert)


def loaded_as(cls: Any, folder: str, config: Any, **settings: Any) -> Any:
    """A model of a class, quantized as it is loaded, or at once after that."""
    if isinstance(config, InPlace):
        return config.load(cls, folder, **settings)
    return cls.from_pretrained(folder, quantization_config=config, **settings)


def leaves(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor subclass is made of."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None:
        yield tensor
    for name in names()[0] if names else ():
        yield from leaves(getattr(tensor, name))


def base_bits(model: nn.Module) -> dict[str, list[bytes]]:
    """Every bit of the base model, packed weights and their scales included."""
    return {
        f"{path}.{key}": [bits(leaf) for leaf in leaves(tensor)]
        for path, module in model.named_modules()
        if not of_adapter(path)
        for key, tensor in own_state(module).items()
    }


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module itself, whether it has adapters or not."""
    found: dict[str, Any] = {}
    if type(module).state_dict is nn.Module.state_dict:
        module._save_to_state_dict(found, "", True)
    else:
        # hqq's layers
        found |= module.state_dict()
    found |= vars(module)
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, Tensor)}


# --- real ones ---


def bnb(**settings: Any) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**settings)


def four_bits(kind: str, double: bool = False, **more: Any) -> BitsAndBytesConfig:
    settings = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    return bnb(load_in_4bit=True, **settings, **more)


def torchao(name: str, **settings: Any) -> TorchAoConfig:
    module = pytest.importorskip("torchao.quantization")
    if name == "IntxWeightOnlyConfig":
        settings["granularity"] = module.PerGroup(32)
    return TorchAoConfig(getattr(module, name)(**settings))


def quanto(kind: str) -> QuantoConfig:
    pytest.importorskip("optimum.quanto")
    # unlike others it would convert the head too
    return QuantoConfig(weights=kind, modules_to_not_convert=["classifier"])


def hqq(bits: int) -> InPlace:
    library = pytest.importorskip("hqq.core.quantize")
    config = library.BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    settings = {"compute_dtype": torch.float32, "device": "cpu"}
    return layers(lambda layer: library.HQQLinear(layer, config, **settings))


def aqlm() -> InPlace:
    library = pytest.importorskip("aqlm")

    def made(layer: nn.Linear) -> nn.Module:
        own = library.QuantizedLinear(
            layer.in_features, layer.out_features, 8, 1, 2, 4, bias=layer.bias is not None
        )
        nn.init.normal_(own.codebooks, std=0.1)
        own.codes.random_(0, 15)
        nn.init.ones_(own.scales)
        return own

    return layers(made)


def sinq() -> InPlace:
    library = pytest.importorskip("sinq.sinqlinear_hf")
    config = library.sinq_base_quant_config(nbits=4, group_size=64)

    def made(layer: nn.Linear) -> nn.Module:
        own = library.SINQLinear(
            layer.in_features, layer.out_features, bias=layer.bias is not None,
            quant_config=config, compute_dtype=torch.float32, device="cpu",
        )  # fmt: skip
        own.quantize(layer.weight.data, bias=layer.bias)
        return own

    return layers(made)


def compressed_tensors() -> InPlace:
    library = pytest.importorskip("compressed_tensors.quantization")
    weights = library.QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=weights)
    config = library.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head", "classifier"],
        quantization_status="frozen", format="pack-quantized",
    )  # fmt: skip

    def convert(model: nn.Module) -> None:
        from compressed_tensors.compressors import ModelCompressor

        library.apply_quantization_config(model, config)
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and hasattr(layer, "weight_scale"):
                grouped = layer.weight.unflatten(1, (-1, 32))  # [d_out, groups, 32]
                layer.weight_scale.data.copy_(grouped.abs().amax(-1) / 7)
                layer.weight_zero_point.data.zero_()
        compressor = ModelCompressor.from_pretrained_model(model, "pack-quantized")
        compressor.compress_model(model)
        # as the first call would, which reads DoRA's norms too late
        compressor.decompress_model(model)
        model.requires_grad_(False)

    return InPlace(convert)


class Gguf(InPlace):
    """A file of Llama in 8 bits, which transformers unpacks as it loads."""

    def __init__(self) -> None:
        pytest.importorskip("gguf")

    def load(self, cls: Any, folder: str, **settings: Any) -> Any:
        """Write the file of the plain model, and load it."""
        from transformers import AutoModel

        plain = AutoModel.from_pretrained(folder)
        with tempfile.TemporaryDirectory() as there:
            write_gguf(plain, Path(there, "model.gguf"))
            return cls.from_pretrained(there, gguf_file="model.gguf", **settings)


def write_gguf(model: Any, path: Path) -> None:
    """Write a Llama's weights in 8 bits."""
    import gguf

    config, kind = model.config, gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in key or "k_proj" in key:
            # llama.cpp has the two halves of a rotation side by side
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            parts = values.reshape(heads, 2, -1, values.shape[1])
            values = parts.swapaxes(1, 2).reshape(values.shape)
        name = names.get_name(f"model.{key}", try_suffixes=(".weight",))
        if values.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bitnet(cls: str, **settings: Any) -> InPlace:
    from transformers.integrations import bitnet as library

    def made(layer: nn.Linear) -> nn.Module:
        own = getattr(library, cls)(
            layer.in_features, layer.out_features, bias=False, dtype=torch.float32, **settings
        )
        if cls == "BitLinear":
            own.weight.copy_(torch.randint(0, 2, own.weight.shape) * 0b01010101)
            own.weight_scale.fill_(10.0)
        else:
            own.weight.copy_(layer.weight)
            nn.init.constant_(getattr(own, "weight_scale", torch.empty(1)), 0.5)
        return own

    return layers(made)


def gemma(scale: float) -> InPlace:
    """Of transformers; with a scale of its inputs, or 0 as long as it is not calibrated."""
    from transformers.integrations.gemma_quant import QuantizedLinear

    def made(layer: nn.Linear) -> nn.Module:
        own = QuantizedLinear(layer.in_features, layer.out_features, num_bits=4)
        own.weight.random_(0, 255)
        nn.init.constant_(own.weight_scale, 0.01)
        nn.init.constant_(own.input_activation_scale, scale)
        return own

    return layers(made)


# --- real layers whose kernel needs a GPU ---


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as int8 with one scale per row."""
    scales = weight.abs().amax(1, keepdim=True) / 127  # [d_out, 1]
    return (weight / scales).round().to(torch.int8), scales


def fp8() -> InPlace:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    def made(layer: nn.Linear) -> nn.Module:
        own = FP8Linear(
            layer.in_features, layer.out_features, (64, 64), has_bias=layer.bias is not None
        )
        own.weight.copy_(layer.weight * 100)
        nn.init.constant_(own.weight_scale_inv, 0.01)
        if layer.bias is not None:
            own.bias.copy_(layer.bias)
        return own

    return layers(made)


def multiply_fp8(x: Tensor, weight: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    """What the kernel of `FP8Linear` returns but for the rounding of inputs."""
    return linear(x, weight.to(x.dtype) * scales[0, 0].to(x.dtype), rest[1])


def eetq() -> InPlace:
    from transformers.integrations.eetq import EetqLinear

    def made(layer: nn.Linear) -> nn.Module:
        own = EetqLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        codes, scales = eight_bits(layer.weight)
        own.weight.copy_(codes.T)
        own.weight_scales = nn.Parameter(scales[:, 0].float(), requires_grad=False)
        if layer.bias is not None:
            own.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
        return own

    return layers(made)


class EetqKernels:
    """The product of int8 weights `[d_in, d_out]`."""

    @staticmethod
    def w8_a16_gemm(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return x @ (weight.to(x.dtype) * scales)


def mxfp4() -> InPlace:
    """The experts of gpt-oss; the layers of its attention are plain."""
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    def convert(model: nn.Module) -> None:
        for path, _ in [*model.named_modules()]:
            if path.endswith("experts"):
                model.set_submodule(path, Mxfp4GptOssExperts(model.config))

    return InPlace(convert)


def halved(_: nn.Module, x: Tensor, *routes: Tensor) -> Tensor:
    """What the experts return."""
    return x / 2


# --- stand-ins ---


class StandIn(nn.Module):
    """A linear layer without a weight, which stores int8 numbers under the names of a library."""

    def __init__(self, layer: nn.Linear, stored: Mapping[str, torch.dtype], trains: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.trains, self.codes = trains, next(iter(stored))
        codes, scales = eight_bits(layer.weight)
        for name, dtype in stored.items():
            tensor = codes.view(dtype) if name == self.codes else torch.ones(2, dtype=dtype)
            self.register_buffer(name, tensor)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            codes = self._buffers[self.codes].view(torch.int8)
            return linear(x, codes.to(x.dtype) * self.scales.to(x.dtype), self.bias)


def stand_in(trains: bool = True, **stored: torch.dtype) -> InPlace:
    return layers(functools.partial(StandIn, stored=stored, trains=trains))


GPTQ = {"qweight": torch.int32, "qzeros": torch.int32, "g_idx": torch.int32}
CODES = {"codes": torch.int16, "codebooks": torch.float16}


@dataclass(frozen=True)
class Scheme:
    """One way to quantize a base model.

    Attributes:
        key: of transformers' `AUTO_QUANTIZER_MAPPING`.
        make: returns a config of transformers, or what converts a model.
        kind: whether the layers are real.
        package: that has the layers.
        patched: functions of transformers to replace, by module and name.
        copies: whether torch can copy the layers.
        saves: whether transformers saves and loads whole models.
        family: of the base model.
        note: of the table.
    """

    key: str
    make: Callable[[], Any]
    kind: str = REAL
    package: str = "transformers"
    patched: tuple[tuple[str, str, Any], ...] = ()
    copies: bool = True
    saves: bool = True
    family: str = "llama"
    note: str = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace what needs a GPU or a compiler."""
        with ExitStack() as stack:
            for module, name, value in self.patched:
                path = f"transformers.integrations.{module}.{name}"
                stack.enter_context(mock.patch(path, value, create=True))
            yield

    @property
    def version(self) -> str:
        """Of the package, empty for a stand-in."""
        return "" if self.kind == STAND_IN else importlib.metadata.version(self.package)


_BNB4 = functools.partial(Scheme, "bitsandbytes_4bit", package="bitsandbytes")
_AO = functools.partial(Scheme, "torchao", package="torchao")
_QUANTO = functools.partial(Scheme, "quanto", package="optimum-quanto", copies=False, saves=False)
_HQQ = functools.partial(
    Scheme, "hqq", package="hqq", saves=False, note="transformers 5.24 cannot load or save it"
)
_OWN = functools.partial(Scheme, saves=False)
_STAND_IN = functools.partial(Scheme, kind=STAND_IN, package="", saves=False)
_INFERENCE = "its kernels have no backward"

SCHEMES: dict[str, Scheme] = {
    "bitsandbytes nf4": _BNB4(lambda: four_bits("nf4")),
    "bitsandbytes nf4, scales quantized": _BNB4(lambda: four_bits("nf4", double=True)),
    "bitsandbytes fp4": _BNB4(lambda: four_bits("fp4")),
    "bitsandbytes int8": Scheme(
        "bitsandbytes_8bit", lambda: bnb(load_in_8bit=True), package="bitsandbytes"
    ),
    "torchao int8": _AO(lambda: torchao("Int8WeightOnlyConfig")),
    "torchao int4": _AO(lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao float8": _AO(lambda: torchao("Float8WeightOnlyConfig")),
    "quanto int8": _QUANTO(lambda: quanto("int8")),
    "quanto int4": _QUANTO(lambda: quanto("int4")),
    "quanto float8": _QUANTO(lambda: quanto("float8")),
    "hqq 4 bits": _HQQ(lambda: hqq(4)),
    "hqq 8 bits": _HQQ(lambda: hqq(8)),
    "compressed-tensors int4": _OWN(
        "compressed-tensors", compressed_tensors, package="compressed-tensors",
        note="unpacked in the first call: call the model before DoRA",
    ),
    "gguf Q8_0": _OWN("gguf", Gguf, package="gguf", note="unpacked into plain layers"),
    "aqlm": _OWN("aqlm", aqlm, package="aqlm"),
    "sinq": _OWN("sinq", sinq, package="sinq"),
    "bitnet, online": _OWN("bitnet", lambda: bitnet("AutoBitLinear", online_quant=True)),
    "bitnet, offline": _OWN("bitnet", lambda: bitnet("AutoBitLinear")),
    "bitnet, packed": _OWN(
        "bitnet", lambda: bitnet("BitLinear"), note="rounds its inputs without a gradient"
    ),
    "gemma": _OWN("gemma", lambda: gemma(0.0)),
    "gemma, calibrated": _OWN(
        "gemma", lambda: gemma(0.03), note="rounds its inputs without a gradient"
    ),
    "fp8": _OWN(
        "fp8", fp8, kind=KERNEL, patched=(("finegrained_fp8", "fp8_linear", multiply_fp8),)
    ),
    "eetq": _OWN(
        "eetq", eetq, kind=KERNEL, patched=(("eetq", "eetq_kernels_hub", EetqKernels),)
    ),
    "mxfp4": _OWN(
        "mxfp4", mxfp4, kind=KERNEL, patched=(("mxfp4", "Mxfp4GptOssExperts.forward", halved),),
        family="gpt_oss", note="only experts are packed, and take no adapters",
    ),
    "gptq": _STAND_IN("gptq", lambda: stand_in(**GPTQ)),
    "awq": _STAND_IN("awq", lambda: stand_in(**GPTQ)),
    "auto-round": _STAND_IN("auto-round", lambda: stand_in(**GPTQ)),
    "quark": _STAND_IN("quark", lambda: stand_in(weight=torch.int8)),
    "higgs": _STAND_IN("higgs", lambda: stand_in(weight=torch.int16, tables=torch.float16)),
    "vptq": _STAND_IN("vptq", lambda: stand_in(indices=torch.int16)),
    "spqr": _STAND_IN("spqr", lambda: stand_in(dense_weights=torch.int32)),
    "fp_quant": _STAND_IN("fp_quant", lambda: stand_in(qweight=torch.uint8, dqweight=torch.half)),
    "fouroversix": _STAND_IN(
        "fouroversix", lambda: stand_in(quantized_weight_values=torch.uint8)
    ),
    "mxfp8": _STAND_IN("mxfp8", lambda: stand_in(weight=torch.uint8)),
    "fbgemm_fp8": _STAND_IN(
        "fbgemm_fp8", lambda: stand_in(trains=False, weight=torch.int8), note=_INFERENCE
    ),
    "nvfp4": _STAND_IN(
        "nvfp4", lambda: stand_in(trains=False, weight=torch.uint8), note=_INFERENCE
    ),
    "metal": _STAND_IN(
        "metal", lambda: stand_in(trains=False, weight=torch.int32), note=_INFERENCE
    ),
}  # fmt: skip
