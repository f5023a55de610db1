"""HillInfer: importance is evaluated where the keys are, and pages come up that are hit again and again."""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.arrays import Floats
from llmcache.kv.importance.bkp import BidirectionalPools
from llmcache.kv.importance.hie import HierarchicalEvaluation
from llmcache.kv.policies.base import KvPolicy, PolicySettings
from llmcache.kv.tiers import Selection


@dataclass(frozen=True)
class HillInferSettings(PolicySettings):
    """Settings of HillInfer; n is `score_block_tokens`.

    `hie`, `bkp`, `app`: each of the three designs can be left out, for ablation; `app` is what the engine is asked for. How
    large the host's pool is says the store (`StoreConfig.cpu_pages`, by `importance.bkp.cpu_pages_for`).
    """

    hie: bool = True
    bkp: bool = True
    app: bool = True


class HillInfer(KvPolicy):
    """Hierarchical importance evaluation (HIE) and bidirectional pools (BKP), over a computational SSD, *emulated* here.

        select:    device and host score their tokens at the same time; score blocks are merged as they come
                   the alpha * N best of each key head are attended to
        attended:  hits are counted; the most hit pages come up, the least hit go down for them

    The third design, the adaptive prefetch-based pipeline (APP), is the engine's: see `llmcache.kv.pipeline`.

    Source: hillinfer.txt, sections 3.2 and 3.3, Algorithm 1. Differs from the paper: see `importance.hie`, `importance.bkp`.
    What is chosen depends on none of the switches, nor on which pool a token is in.
    """

    name = "hillinfer"
    title = "HillInfer"
    ssd = "csd"
    ahead = True
    settings_class = HillInferSettings
    settings: HillInferSettings

    def begin(self) -> None:
        """Makes what it keeps; `KvPolicy.begin`."""
        asked = self.settings
        n, combine = asked.score_block_tokens, asked.combine
        self._evaluation = HierarchicalEvaluation(self.store, n, combine, parallel=asked.hie, timeline=self.timeline)
        self.pools = BidirectionalPools(self.store, asked.attended, enabled=asked.bkp)
        self.remembered.append(self.pools.hits)

    def choose(self, layer: int, queries: Floats, tokens: int) -> Selection:
        """Returns the tokens with the largest products of key and query, as Algorithm 1 finds them."""
        return Selection(self._evaluation.important(layer, queries, tokens, self.first))

    def attended(self, layer: int, selection: Selection, weights: Floats | None = None) -> None:
        """Counts what was chosen, and moves pages between the pools; `weights` are not looked at."""
        self.pools.update(layer, selection.positions)
