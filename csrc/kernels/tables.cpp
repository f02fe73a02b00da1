#include "kernels/tables.hpp"

namespace quire {

// Every kernel file fills in its part of the table, at the levels that CMakeLists.txt compiles it
// for.
namespace portable {
void fill_attention(Kernels&);
void fill_attention_prompts(Kernels&);
void fill_coded(Kernels&);
void fill_coded_pack(Kernels&);
void fill_dequantized(Kernels&);
void fill_experts(Kernels&);
void fill_latent(Kernels&);
void fill_limits(Kernels&);
void fill_linear(Kernels&);
void fill_lora(Kernels&);
void fill_linear_pack(Kernels&);
void fill_quantized(Kernels&);
void fill_rope_store(Kernels&);
void fill_route(Kernels&);
void fill_rows(Kernels&);
void fill_sample(Kernels&);
void fill_scan(Kernels&);
void fill_state(Kernels&);
}  // namespace portable
#if defined(__x86_64__)
namespace avx2 {
void fill_attention(Kernels&);
void fill_attention_prompts(Kernels&);
void fill_coded(Kernels&);
void fill_coded_digits(Kernels&);
void fill_dequantized(Kernels&);
void fill_experts(Kernels&);
void fill_latent(Kernels&);
void fill_limits(Kernels&);
void fill_linear(Kernels&);
void fill_linear_pack(Kernels&);
void fill_lora(Kernels&);
void fill_quantized(Kernels&);
void fill_rope_store(Kernels&);
void fill_route(Kernels&);
void fill_rows(Kernels&);
void fill_sample(Kernels&);
void fill_scan(Kernels&);
void fill_state(Kernels&);
}  // namespace avx2
namespace avx_vnni {
void fill_coded_digits(Kernels&);
void fill_limits(Kernels&);
void fill_quantized(Kernels&);
}  // namespace avx_vnni
namespace avx512 {
void fill_attention(Kernels&);
void fill_attention_prompts(Kernels&);
void fill_coded(Kernels&);
void fill_dequantized(Kernels&);
void fill_experts(Kernels&);
void fill_latent(Kernels&);
void fill_limits(Kernels&);
void fill_linear(Kernels&);
void fill_linear_pack(Kernels&);
void fill_lora(Kernels&);
void fill_rope_store(Kernels&);
void fill_route(Kernels&);
void fill_rows(Kernels&);
void fill_sample(Kernels&);
void fill_scan(Kernels&);
void fill_state(Kernels&);
}  // namespace avx512
namespace avx512_vnni {
void fill_coded_digits(Kernels&);
void fill_limits(Kernels&);
void fill_quantized(Kernels&);
}  // namespace avx512_vnni
namespace avx512_bf16 {
void fill_attention(Kernels&);
void fill_limits(Kernels&);
void fill_linear(Kernels&);
}  // namespace avx512_bf16
#endif

Kernels kernels_for(Level level) {
    Kernels table{};
    portable::fill_attention(table);
    portable::fill_attention_prompts(table);
    portable::fill_coded(table);
    portable::fill_coded_pack(table);
    portable::fill_dequantized(table);
    portable::fill_experts(table);
    portable::fill_latent(table);
    portable::fill_limits(table);
    portable::fill_linear(table);
    portable::fill_lora(table);
    portable::fill_linear_pack(table);
    portable::fill_quantized(table);
    portable::fill_rope_store(table);
    portable::fill_route(table);
    portable::fill_rows(table);
    portable::fill_sample(table);
    portable::fill_scan(table);
    portable::fill_state(table);
#if defined(__x86_64__)
    if (includes(level, Level::avx2)) {
        avx2::fill_attention(table);
        avx2::fill_attention_prompts(table);
        avx2::fill_coded(table);
        avx2::fill_coded_digits(table);
        avx2::fill_dequantized(table);
        avx2::fill_experts(table);
        avx2::fill_latent(table);
        avx2::fill_limits(table);
        avx2::fill_linear(table);
        avx2::fill_linear_pack(table);
        avx2::fill_lora(table);
        avx2::fill_quantized(table);
        avx2::fill_rope_store(table);
        avx2::fill_route(table);
        avx2::fill_rows(table);
        avx2::fill_sample(table);
        avx2::fill_scan(table);
        avx2::fill_state(table);
    }
    if (includes(level, Level::avx_vnni)) {
        avx_vnni::fill_coded_digits(table);
        avx_vnni::fill_limits(table);
        avx_vnni::fill_quantized(table);
    }
    if (includes(level, Level::avx512)) {
        avx512::fill_attention(table);
        avx512::fill_attention_prompts(table);
        avx512::fill_coded(table);
        avx512::fill_dequantized(table);
        avx512::fill_experts(table);
        avx512::fill_latent(table);
        avx512::fill_limits(table);
        avx512::fill_linear(table);
        avx512::fill_linear_pack(table);
        avx512::fill_lora(table);
        avx512::fill_rope_store(table);
        avx512::fill_route(table);
        avx512::fill_rows(table);
        avx512::fill_sample(table);
        avx512::fill_scan(table);
        avx512::fill_state(table);
    }
    if (includes(level, Level::avx512_vnni)) {
        avx512_vnni::fill_coded_digits(table);
        avx512_vnni::fill_limits(table);
        avx512_vnni::fill_quantized(table);
    }
    if (includes(level, Level::avx512_bf16)) {
        avx512_bf16::fill_attention(table);
        avx512_bf16::fill_limits(table);
        avx512_bf16::fill_linear(table);
    }
#else
    (void)level;
#endif
    return table;
}

}  // namespace quire
