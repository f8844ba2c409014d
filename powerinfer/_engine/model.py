"""A model: the weights of a file, a typed object over the engine's handle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ClosedError
from . import _native, formats
from .file import ModelFile
from .types import (
    ACTIVATION,
    GATING,
    KV_TYPE,
    PREDICTOR,
    Activation,
    ModelInfo,
    Predictor,
    Progress,
    name_of,
    number_of,
)


class Model:
    """The weights of one model, mapped from a file. May be used by many sessions and threads."""

    def __init__(
        self,
        file: ModelFile | str | os.PathLike[str],
        *,
        activation: Activation = "auto",
        predictor: Predictor = "auto",
        predictor_type: str | None = None,
        use_mmap: bool = True,
        use_mlock: bool = False,
        next_head: bool = False,
        load: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Opens and loads.

        activation: of the feed-forward, where the file does not say what the model was trained with.
        predictor: "mlp" (fc1 and fc2 of the file), "sign" (any ReLU model: the signs of its weights, taken
            while loading), "none", or "auto" (what the file says).
        predictor_type: weight format that fc1 and fc2 are rewritten in while loading ("Q8_0"); None: as in
            the file.
        use_mmap: False copies the weights into memory of huge pages, a neuron's up and down rows side by
            side: slower to load, faster to read.
        use_mlock: keep the weights in RAM.
        next_head: not the model but its head for further tokens (NextN, MTP), a model of one layer, whose
            sessions read a hidden state beside each token.
        load: False only looks (names, shapes and types are checked); such a model can have no sessions.
        progress: called as progress(done, total) while weights are prepared; an exception from it ends
            loading.

        Raises FileError, FormatError (a missing or misshapen tensor), UnsupportedError (architecture or
        tensor type), ArgumentError, OutOfMemoryError (before anything is copied, if there is less memory
        than loading takes).
        """
        self.file = file if isinstance(file, ModelFile) else ModelFile(file)
        self.next_head = next_head
        ffi, lib = _native.ffi, _native.lib
        options = ffi.new("pi_model_options *", lib.pi_model_defaults())
        options.activation = number_of("activation", ACTIVATION, activation)
        options.predictor = number_of("predictor", PREDICTOR, predictor)
        if predictor_type is not None:
            options.predictor_type = formats.number(predictor_type)
        options.use_mmap = bool(use_mmap)
        options.use_mlock = bool(use_mlock)
        options.next_head = bool(next_head)
        out = ffi.new("pi_model **")
        _native.check(lib.pi_model_open(self.file.handle, options, out))
        self._handle: Any = ffi.gc(out[0], lib.pi_model_close)
        done, total = ffi.new("int32_t *"), ffi.new("int32_t *")
        while load:
            _native.check(lib.pi_model_load(self._handle, done, total))
            if progress is not None:
                progress(done[0], total[0])
            if done[0] >= total[0]:
                break
        self.info = self._read_info()

    def _read_info(self) -> ModelInfo:
        native = _native.ffi.new("pi_model_info *")
        _native.lib.pi_model_get_info(self._handle, native)
        return ModelInfo(
            architecture=_native.ffi.string(native.architecture).decode("utf-8", "replace"),
            n_layer=native.n_layer,
            n_embd=native.n_embd,
            n_head=native.n_head,
            n_head_kv=native.n_head_kv,
            n_embd_head=native.n_embd_head,
            n_ff=native.n_ff,
            n_vocab=native.n_vocab,
            n_ctx_train=native.n_ctx_train,
            activation=name_of(ACTIVATION, native.activation),
            activation_threshold=native.activation_threshold,
            is_gated=bool(native.is_gated),
            n_expert=native.n_expert,
            n_expert_used=native.n_expert_used,
            n_layer_dense=native.n_layer_dense,
            expert_gating=name_of(GATING, native.expert_gating),
            n_neurons=native.n_neurons,
            n_placed=native.n_placed,
            predictor=name_of(PREDICTOR, native.predictor),
            sparse_threshold=native.sparse_threshold,
            can_skip_down=bool(native.can_skip_down),
            n_layer_down_transposed=native.n_layer_down_transposed,
            n_weight_bytes=native.n_weight_bytes,
            n_transposed_bytes=native.n_transposed_bytes,
            n_copied_bytes=native.n_copied_bytes,
            n_sign_bytes=native.n_sign_bytes,
            n_parameters=native.n_parameters,
            n_next=native.n_next,
            n_recurrent=native.n_recurrent,
            n_state_bytes=native.n_state_bytes,
            rope=_native.ffi.string(native.rope).decode("utf-8", "replace"),
        )

    @property
    def thresholds(self) -> list[float]:
        """The file's threshold of the predictor's scores in each layer."""
        return [_native.lib.pi_model_threshold(self.handle, i) for i in range(self.info.n_layer)]

    @property
    def handle(self) -> Any:
        """The native model. Raises ClosedError after close()."""
        if self._handle is None:
            raise ClosedError("the model is closed")
        return self._handle

    def kv_bytes(
        self, n_ctx: int, *, n_pool: int = 0, n_seq: int = 1, n_batch: int = 512, type_k: str, type_v: str
    ) -> int:
        """K and V of a session of that shape, wherever they lie. Raises ArgumentError."""
        options = _native.ffi.new("pi_session_options *", _native.lib.pi_session_defaults())
        sizes = {"n_ctx": n_ctx, "n_pool": n_pool, "n_seq": n_seq, "n_batch": n_batch}
        for name, value in sizes.items():
            setattr(options, name, _native.fit(name, value))
        options.type_k = number_of("type_k", KV_TYPE, type_k)
        options.type_v = number_of("type_v", KV_TYPE, type_v)
        n_bytes = int(_native.lib.pi_model_kv_bytes(self.handle, options))
        if not n_bytes:
            raise ArgumentError(_native.message())
        return n_bytes

    def matrix_shape(self, name: str) -> tuple[int, int] | None:
        """(rows, columns) of a matrix of the file, `ffn_down` also where it is stored transposed; None if it
        has none of that name."""
        shapes = {t.name: t.shape for t in self.file.tensors if len(t.shape) == 2}
        found = shapes.get(name)
        if found is None and (turned := shapes.get(name.replace("ffn_down.", "ffn_down_t."))) is not None:
            found = turned[::-1]
        return None if found is None else (found[0], found[1])

    def add_adapter(
        self, name: str, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], *, scale: float = 1.0
    ) -> None:
        """Adds scale * b (a x) to the product of a matrix; there may be no sessions yet.

        name: of a matrix of a layer, `output.weight`, or `token_embd.weight`, whose rows become those of
        W + scale * b a (not so where it is the output matrix, too). a: [rank, columns], b: [rows, rank];
        copied. Raises ArgumentError, UnsupportedError (another tensor), OutOfMemoryError.
        """
        shape = self.matrix_shape(name)
        first, second = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
        if shape is None or first.shape != (len(first), shape[1]) or second.shape != (shape[0], len(first)):
            raise ArgumentError(f"an adapter of shapes {first.shape} and {second.shape} does not fit {name}")
        ffi = _native.ffi
        _native.check(
            _native.lib.pi_model_add_adapter(
                self.handle,
                name.encode(),
                _native.fit("rank", len(first)),
                float(scale),
                ffi.from_buffer("float[]", first),
                ffi.from_buffer("float[]", second),
            )
        )

    def close(self) -> None:
        """Frees the model once no session uses it; later calls raise ClosedError. `info` stays."""
        self._handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
