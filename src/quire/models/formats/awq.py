"""AWQ (Lin et al. 2024): codes of four bits with zero points, packed along the outputs."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.formats.keys import OF_AUTO_ROUND, group_size, has_segment, names
from quire.models.formats.storage import CodeLayout, Storage

_IRRELEVANT = (
    # how it was made, and with which kernels another library runs it
    *("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "dataset"),
    *("tokenizer", "damp_percent", "desc_act", "act_group_aware", "true_sequential", "meta"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size"),
    *("pad_token_id", "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize"),
    *("sym", "pack_dtype", "lm_head"),
    "zero_point",  # without ones of their own, files have the middle of the codes for all groups
)


def read_awq(reader: ConfigReader) -> Storage:
    """Modules that the files store plainly (head, routers) are not listed by most checkpoints."""
    reader.rename(bits="w_bit", group_size="q_group_size")
    reader.ignore(*_IRRELEVANT, *OF_AUTO_ROUND)
    reader.only("bits", 4)
    reader.only("method", "awq")  # quant_method once more, in files of GPTQModel
    reader.only("data_type", "int")
    reader.only("version", "gemm", "GEMM")
    reader.only("format", "gemm", "awq")
    reader.only("checkpoint_format", "gemm", "awq")
    layout = CodeLayout("awq", 4, group_size(reader, "group_size", 128), has_zeros=True)
    kept = names(reader, "modules_to_not_convert")

    def layout_of(module: str) -> CodeLayout | None:
        return None if has_segment(module, kept) else layout

    return Storage("awq", layout_of, is_decided_by_files=True, group=layout.group or 0)
