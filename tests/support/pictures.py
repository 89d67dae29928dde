"""Processors of tiny vision models, built offline from transformers' own classes, and pictures; test support."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from string import ascii_letters, digits
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from tests.support import zoo

CHAT = (
    "{% for message in messages %}<user>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end>{% endfor %}"
)
SQUARES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
AREA = {"shortest_edge": 64, "longest_edge": 512}  # pixels of a picture
ONE_SQUARES = {"patch_size": 4, "temporal_patch_size": 1, "merge_size": 2, "size": AREA}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # processor, image processor, what that takes, what the processor takes
    "qwen3_vl_moe": ("Qwen3VLProcessor", "Qwen2VLImageProcessorPil", SQUARES | {"size": AREA}, {}),
    "qwen3_5_moe-vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorPil", SQUARES | {"size": AREA}, {}),
    "glm4v_moe": ("Glm4vProcessor", "Glm4vImageProcessorPil", SQUARES | {"size": AREA}, {}),
    "glm5_next": ("Glm5NextProcessor", "Glm5NextImageProcessorPil", SQUARES | {"size": AREA}, {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessorPil", ONE_SQUARES, {},
    ),
    "gemma4-vl": (
        "Gemma4Processor", "Gemma4ImageProcessorPil",
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}, {"feature_extractor": None},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeProcessor", "Qwen2VLImageProcessorPil", SQUARES | {"size": AREA}, {"feature_extractor": None},
    ),
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter, digit and blank, in a vocabulary of 96, and those that the zoo's configs name."""
    special = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<begin>", "<close>", "<vbegin>", "<vclose>", "<audio>"]
    special += ["<break>", "<user>", "<end>", "<unk>", "<boa>", "<eoa>"]
    vocabulary = {token: number for number, token in enumerate([*special, *ascii_letters, *digits, " ", "."])}
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    named = {
        **{"image_token": "<image>", "video_token": "<video>", "audio_token": "<audio>"},
        **{"vision_start_token": "<begin>", "vision_end_token": "<close>", "boi_token": "<begin>"},
        **{"eoi_token": "<close>", "image_start_token": "<begin>", "image_end_token": "<close>"},
        **{"video_start_token": "<vbegin>", "video_end_token": "<vclose>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
        **{"vision_bos_token": "<begin>", "vision_eos_token": "<close>"},
        **{"audio_bos_token": "<boa>", "audio_eos_token": "<eoa>"},
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=named | {f"other_{place}": token for place, token in enumerate(special[10:13])},
    )


def processor(name: str, chat: bool = True) -> Any:
    """The processor of a family of the zoo; video is left out, for which transformers asks torchvision."""
    own, images, options, more = FAMILIES[name]
    parts = {"image_processor": getattr(transformers, images)(**options), "tokenizer": tokenizer()}
    kind = getattr(transformers, own)
    if "video_processor" in kind.get_attributes():
        parts["video_processor"] = None
    image = "<image>" if name == "gemma4-vl" else "<begin><image><close>"  # which adds the others itself
    template = CHAT.replace("IMAGE", image) if chat else None
    with patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: object):
        return kind(**parts, **more, chat_template=template)


def picture(seed: int = 0, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))


def build(name: str, blocks: int = 1) -> Any:
    """The zoo's model with a vision tower of so many blocks."""
    changes: dict[str, Any] = {"vision_config.position_embedding_size": 64} if name.startswith("gemma4") else {}
    changes |= {"vision_start_token_id": 5, "vision_end_token_id": 6} if name == "qwen3_omni_moe" else {}
    depth = "num_hidden_layers" if name.startswith("gemma4") else "depth"
    return zoo.build(name, **changes, **{f"vision_config.{depth}": blocks})


def save(name: str, folder: Path, blocks: int = 1) -> Any:
    """Write that model with its tokenizer; returns the stock model. Its processor is `processor(name)`."""
    model = build(name, blocks)
    zoo.save_once(folder, (name, "pictures", blocks), model.save_pretrained)
    tokenizer().save_pretrained(folder)
    return model


def llava(folder: Path) -> Any:
    """Write LLaVA of CLIP and the zoo's Qwen3-MoE, whose processor needs no torchvision; returns the stock model."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = zoo.configure("qwen3_moe", max_position_embeddings=128)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=3, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    zoo.randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    llava_processor().save_pretrained(folder)
    return model


def llava_processor(chat: bool = True) -> Any:
    """LLaVA's processor, which needs no torchvision."""
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    options: dict[str, Any] = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    template = CHAT.replace("IMAGE", "<image>") if chat else None
    return transformers.LlavaProcessor(images, tokenizer(), patch_size=8, chat_template=template, **options)


@cache
def llava_tokenizer(chat: bool = True) -> Any:
    """The tokenizer of a folder that has LLaVA's processor, too."""
    folder = tempfile.mkdtemp(prefix="moe-compressor-processor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    llava_processor(chat).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
