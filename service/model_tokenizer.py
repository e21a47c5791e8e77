"""Loads the tokenizer of a folder, but no code that comes with a model. Imports transformers late."""

import json
from pathlib import Path
from typing import Any


def open_tokenizer(folder: Path) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return the tokenizer in `folder` as transformers loads it. Raises ValueError, which says why not."""
    config = folder / "tokenizer_config.json"
    try:
        from transformers import AutoTokenizer

        # The files that this names may be anywhere, and are not covered by the identity.
        names_files = config.is_file() and "fast_tokenizer_files" in json.loads(config.read_bytes())
        # Nor is Mistral's own, which comes to a Hub model's folder with the weights only.
        is_tekken = (folder / "tekken.json").exists() and not (folder / "tokenizer.json").exists()
        if not names_files and not is_tekken:
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, mistral_format=False
            )
    except MemoryError:
        raise
    except Exception as error:  # the library of tokenizers raises Exception itself, too
        # The second line names a config's fault.
        raise ValueError(" ".join(str(error).strip().split("\n")[:2])) from error
    if is_tekken:
        raise ValueError("'tekken.json' is not read, and it has no tokenizer.json")
    raise ValueError("'fast_tokenizer_files' in its tokenizer_config.json is not read")
