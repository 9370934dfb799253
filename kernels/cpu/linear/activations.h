// Activations, element by element.
#pragma once

#include "native/exp.h"

namespace quire {

enum Activation { SILU, GELU, GELU_TANH, SWIGLU_OAI, RELU, TANH };  // the first four as in kernels/dense/gated_activation.py

QUIRE_INLINE vfloat silu(vfloat x) { return x / (exp_of(-x) + 1.f); }

// 0.5 x erfc(-x / sqrt 2), with erfc's Chebyshev fit of Numerical Recipes (6.2, erfcc): 1.2e-7 of its value everywhere.
QUIRE_INLINE vfloat gelu(vfloat x) {
    const vfloat z = x * 0.70710678f;
    const vfloat a = z < 0.f ? -z : z;
    const vfloat t = 1.f / (a * 0.5f + 1.f);
    vfloat p = splat(0.17087277f);
    p = multiply_add(p, t, -0.82215223f);
    p = multiply_add(p, t, 1.48851587f);
    p = multiply_add(p, t, -1.13520398f);
    p = multiply_add(p, t, 0.27886807f);
    p = multiply_add(p, t, -0.18628806f);
    p = multiply_add(p, t, 0.09678418f);
    p = multiply_add(p, t, 0.37409196f);
    p = multiply_add(p, t, 1.00002368f);
    p = multiply_add(p, t, -1.26551223f);
    const vfloat tail = t * exp_of(p - a * a);  // erfc(|z|)
    const vfloat both = z < 0.f ? tail : 2.f - tail;
    return x * 0.5f * both;
}

// x sigmoid(2 u), which is 0.5 x (1 + tanh u).
QUIRE_INLINE vfloat gelu_tanh(vfloat x) {
    const vfloat u = (x * x * x * 0.044715f + x) * 0.79788456f;
    return x / (exp_of(u * -2.f) + 1.f);
}

// 1 - 2 / (e^2x + 1), of which both ends are exact.
QUIRE_INLINE vfloat tanh_of(vfloat x) { return 1.f - 2.f / (exp_of(x * 2.f) + 1.f); }

template <int A>
QUIRE_INLINE vfloat activate(vfloat x) {
    if constexpr (A == SILU) return silu(x);
    if constexpr (A == GELU) return gelu(x);
    if constexpr (A == RELU) return x < 0.f ? vfloat{} : x;  // NaN stays NaN
    if constexpr (A == TANH) return tanh_of(x);
    return gelu_tanh(x);
}

// Calls body with the activation as a constant.
template <class Body>
QUIRE_INLINE void with_activation(int activation, const Body& body) {
    switch (activation) {
        case SILU: return body(std::integral_constant<int, SILU>{});
        case GELU: return body(std::integral_constant<int, GELU>{});
        case RELU: return body(std::integral_constant<int, RELU>{});
        case TANH: return body(std::integral_constant<int, TANH>{});
        default: return body(std::integral_constant<int, GELU_TANH>{});
    }
}

}  // namespace quire
