"""The folder of a LoRA adapter, which lies inside LORA_DIR with its files. No torch."""

from pathlib import Path

from worker.messages.adapters import InvalidAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_folder(root: str, path: str) -> Path:
    """Return the folder of an adapter. `path` is relative to `root`, or absolute.

    Raise InvalidAdapter if it has not the files of an adapter, or if they lie outside of `root`
    once symbolic links are followed.
    """
    try:
        inside = Path(root).expanduser().resolve(strict=True)
        folder = (inside / Path(path).expanduser()).resolve()
        files = {name: (folder / name).resolve() for name in (CONFIG, WEIGHTS)}
        if not all(path.is_relative_to(inside) for path in (folder, *files.values())):
            raise InvalidAdapter("it is not inside LORA_DIR")
        if not folder.is_dir():
            raise InvalidAdapter("there is no such folder in LORA_DIR")
        for name, file in files.items():
            if not file.is_file():
                raise InvalidAdapter(f"there is no {name}; other formats are not read")
    except (OSError, ValueError, RuntimeError):
        raise InvalidAdapter("it is no path of a folder in LORA_DIR") from None
    return folder
