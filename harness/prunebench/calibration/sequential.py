"""A pass over every decoder layer, MoE or not, in which each layer may be changed before the next one sees its outputs.

It is the fit pass's engine (`stream`), stopped at all layers: the whole text stands before a layer, `work` runs it as
often as it likes, under hooks or modes of its own, and may edit its weights; then the changed layer gives the hidden
states that the next one gets. A model whose layers cannot be run alone gets whole forwards, and the proof says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from prunebench.calibration.stream import Buffers, Progress, See, _Engine
from prunebench.errors import UsageError
from prunebench.moe import LayerProgram, MoELayer, MoEModel
from prunebench.moe.decoder import Batch, Proof, decoder_layers

__all__ = ["DecoderVisit", "stream_decoder"]


@dataclass(frozen=True)
class DecoderVisit:
    """One decoder layer with the whole text before it.

    Args:
        position: of the layer among the decoder layers, which is its index in module paths.
        name: its module path.
        module: the layer.
        moe: its router and experts; None in a dense layer.
        tokens: of the text.
        run: run the layer over the whole text; `see`, which only an MoE layer has anything for, gets every batch.
    """

    position: int
    name: str
    module: nn.Module
    moe: MoELayer | None
    tokens: int
    run: Callable[[See | None], None]


def stream_decoder(
    moe: MoEModel,
    batches: Sequence[Batch],
    work: Callable[[DecoderVisit], None],
    *,
    programs: Mapping[int, LayerProgram] | None = None,
    buffers: Buffers = "host",
    progress: Progress | None = None,
) -> Proof:
    """Bring the whole text before one decoder layer after the other.

    Args:
        moe: the opened model.
        batches: the model's keyword arguments of each forward, with `input_ids`.
        work: called once per layer; what it leaves of the layer is what gives the next one's hidden states.
        programs: what MoE layers run, as `stream_layers` takes it.
        buffers: where hidden states wait.
        progress: called with (what, done, total).

    Returns:
        Whether the layers were run one at a time, and why not.

    Raises:
        UsageError: a model whose MoE layers stand in several lists; no batches.
    """
    modules, prefix, reason = decoder_layers(moe)
    if reason:
        raise UsageError(reason, expected="one list of decoder layers")
    by_index = {layer.index: layer for layer in moe.layers}
    engine = _Engine(moe, batches, programs or {}, buffers, progress)
    engine.keeps_outputs = False
    count = len(modules) if engine.stack is None else len(engine.stack.layers)
    with engine:
        for position, module in enumerate(modules[:count]):
            engine.advance(position)
            layer = by_index.get(position)

            def run(see: See | None, position: int = position, layer: MoELayer | None = layer) -> None:
                engine.run_layer(position, layer, see)

            work(DecoderVisit(position, f"{prefix}.{position}", module, layer, engine.tokens, run))
            engine.report("decoder layers", position + 1, count)
    return engine.proof
