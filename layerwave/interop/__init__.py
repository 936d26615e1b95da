"""How other tools name, store and read what layerwave makes."""

from layerwave.interop.layer_ids import CONSUMERS, Consumer, LayerIds, layer_ids, layer_ids_table

__all__ = ["CONSUMERS", "Consumer", "LayerIds", "layer_ids", "layer_ids_table"]
