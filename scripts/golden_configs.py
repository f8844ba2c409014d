"""Write tests/golden/configs.json.xz: the config.json that transformers saves with the small models of the
families that are rows of the converter's table. Tests must write weights under the names that it saves.

For maintainers; needs torch and transformers. Run from the repository root:

    python scripts/golden_configs.py
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import golden_checkpoints
import golden_models

from tests import models
from tests.convert import published

UNUSED = ("transformers_version", "dtype", "experts_implementation", "attn_implementation")


def main() -> int:
    configs: dict[str, Any] = {}
    for name in published.NAMES:
        if name in published.SPECS:
            spec = models.SPECS[name]
            model = golden_models.build(spec, models.draw(spec))
        else:
            model = golden_checkpoints.build(name)[0]
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            with safe_open(Path(folder) / "model.safetensors", "np") as file:
                names = list(file.keys())
                saved = {key: tuple(file.get_slice(key).get_shape()) for key in names}
        ours = {key: value.shape for key, value in published.weights(name).items()}
        if saved != ours:
            raise ValueError(f"{name}: {set(saved.items()) ^ set(ours.items())}")
        configs[name] = {key: value for key, value in config.items() if key not in UNUSED}
    published.CONFIGS.write_bytes(lzma.compress(json.dumps(configs, sort_keys=True).encode(), preset=9))
    return 0


if __name__ == "__main__":
    sys.exit(main())
