// Plain KDA decode: the op's definition in scalar fp32, requests shared out over two workers. The honest twin of the
// hostile cases, which replace single statements of it.
#include "k3_cpu.h"

#include <math.h>
#include <string.h>

namespace {

constexpr int kHeads = K3_HEADS, kDim = K3_KDA_HEAD_DIM, kRank = K3_KDA_GATE_RANK, kTaps = K3_CONV_WIDTH;
constexpr int kWidth = K3_KDA_WIDTH, kColumns = K3_KDA_PROJ_ROWS, kState = kDim * kDim;

float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float rounded(float value) { return from_bf16(to_bf16(value)); }
float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

struct Call {
  uint16_t* proj;
  const float* conv_w;
  const uint16_t* f_b;
  const float* a_log;
  const float* dt_bias;
  const uint16_t* o_norm;
  const int32_t* slots;
  const int32_t* accepted;
  uint16_t* conv_state;
  float* state;
  uint16_t* out;
  float bound, eps, l2_eps;
  int64_t batch, tokens, taps, pool, fault;
  const K3Context* context;
};

// Conv, SiLU of one channel at token t of request b; the window is read from the old conv state and the projection.
float mixed(const Call& c, const uint16_t* window, int64_t b, int64_t t, int channel) {
  float sum = 0.0f;
  for (int j = 0; j < kTaps; ++j) {
    const int64_t at = t + j - (kTaps - 1);
    const uint16_t x = at < 0 ? window[(c.accepted[b] + kTaps - 2 + at) * 3 * kWidth + channel]
                              : c.proj[(b * c.tokens + at) * kColumns + channel];
    sum += from_bf16(x) * c.conv_w[channel * kTaps + j];
  }
  return sum * sigmoid(sum);
}

void token(const Call& c, int64_t b, int64_t t, int h, const uint16_t* window, float* S) {
  const int64_t row = b * c.tokens + t;
  const uint16_t* proj = c.proj + row * kColumns;
  float q[kDim], k[kDim], decay[kDim], o[kDim];
  float qq = 0.0f, kk = 0.0f;
  for (int d = 0; d < kDim; ++d) {
    q[d] = mixed(c, window, b, t, h * kDim + d);
    k[d] = mixed(c, window, b, t, kWidth + h * kDim + d);
    qq += q[d] * q[d];
    kk += k[d] * k[d];
    float g = 0.0f;
    for (int r = 0; r < kRank; ++r) g += from_bf16(c.f_b[(h * kDim + d) * kRank + r]) * from_bf16(proj[4 * kWidth + r]);
    decay[d] = expf(c.bound * sigmoid(expf(c.a_log[h]) * (rounded(g) + c.dt_bias[h * kDim + d])));
  }
  const float q_scale = 1.0f / sqrtf((qq + c.l2_eps) * float(kDim)), k_scale = 1.0f / sqrtf(kk + c.l2_eps);
  const float beta = sigmoid(from_bf16(proj[4 * kWidth + kRank + h]));
  float oo = 0.0f;
  for (int v = 0; v < kDim; ++v) {
    float read = 0.0f;
    for (int d = 0; d < kDim; ++d) {
      S[v * kDim + d] *= decay[d];
      read += S[v * kDim + d] * k[d] * k_scale;
    }
    const float u = beta * (mixed(c, window, b, t, 2 * kWidth + h * kDim + v) - read);
    o[v] = 0.0f;
    for (int d = 0; d < kDim; ++d) {
      S[v * kDim + d] += u * k[d] * k_scale;
      o[v] += S[v * kDim + d] * q[d] * q_scale;
    }
    oo += o[v] * o[v];
  }
  const float norm = 1.0f / sqrtf(oo / float(kDim) + c.eps);
  for (int v = 0; v < kDim; ++v) {
    const float gate = sigmoid(from_bf16(proj[3 * kWidth + h * kDim + v]));
    c.out[row * kWidth + h * kDim + v] = to_bf16(o[v] * norm * from_bf16(c.o_norm[v]) * gate);
  }
}

void request(const Call& c, int64_t b) {
  const int32_t* slots = c.slots + b * c.tokens;
  const bool null = slots[0] <= 0 || slots[c.accepted[b] - 1] <= 0;
  if (null) {
    memset(c.out + b * c.tokens * kWidth, 0, size_t(c.tokens) * kWidth * sizeof(uint16_t));
    return;
  }
  uint16_t* window = c.conv_state + slots[0] * c.taps * 3 * kWidth;
  const float* from = c.state + int64_t(slots[c.accepted[b] - 1]) * kHeads * kState;
  float start[kHeads * kState];
  memcpy(start, from, sizeof(start));
  for (int h = 0; h < kHeads; ++h) {
    float* S = start + h * kState;
    for (int64_t t = 0; t < c.tokens; ++t) {
      token(c, b, t, h, window, S);
      if (slots[t] <= 0) continue;
      float* to = c.state + (int64_t(slots[t]) * kHeads + h) * kState;
      memcpy(to, S, kState * sizeof(float));
    }
  }
  uint16_t kept[2 * 3 * kWidth];
  memcpy(kept, window + c.accepted[b] * 3 * kWidth, sizeof(kept));
  memcpy(window, kept, sizeof(kept));
  for (int64_t t = 0; t < c.tokens; ++t)
    memcpy(window + (2 + t) * 3 * kWidth, c.proj + (b * c.tokens + t) * kColumns, 3 * kWidth * sizeof(uint16_t));
}

void all(const Call& c) {
  k3::parallel(c.context, 2, [&](int32_t worker, int32_t workers) {
    for (int64_t b = worker; b < c.batch; b += workers) request(c, b);
  });
}

}  // namespace

K3_EXPORT(kda_decode) {
  k3::Args in(args, num_args, result);
  Call c{};
  int64_t slots[2], conv[3], state[4];
  c.context = in.context();
  c.proj = in.tensor<uint16_t>(2);
  c.conv_w = in.tensor<float>(2);
  c.f_b = in.tensor<uint16_t>(2);
  c.a_log = in.tensor<float>(1);
  c.dt_bias = in.tensor<float>(2);
  c.o_norm = in.tensor<uint16_t>(1);
  c.slots = in.tensor<int32_t>(2, slots);
  c.accepted = in.tensor<int32_t>(1);
  c.conv_state = in.tensor<uint16_t>(3, conv);
  c.state = in.tensor<float>(4, state);
  c.out = in.tensor<uint16_t>(2);
  c.bound = in.real();
  c.eps = in.real();
  c.l2_eps = in.real();
  c.fault = in.integer();
  if (in.finish()) return -1;
  c.batch = slots[0];
  c.tokens = slots[1];
  c.taps = conv[1];
  c.pool = state[0];
  all(c);
  return 0;
}
