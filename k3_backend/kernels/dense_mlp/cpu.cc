// Dense SiTU MLP of the first layer in one fork-join: gate and up projection, activation, down projection.
//
// h = bf16(f(bf16(W_g x), bf16(W_u x))); out = bf16(W_down h); f = SiTU.
// Shapes: x bf16 [M, D] activation, w_gate_up bf16 [2 I, D] constant (gate rows first), w_down bf16 [D, I] constant,
// out bf16 [M, D] output; D = hidden, I = dense width. Policy: a tile of gate rows and its tile of up rows are
// multiplied together, so the activation happens while both are in cache; h goes to scratch in the layout that the
// second product reads. Workers split the rows of each weight; one barrier separates the two products.
#include "common/bind.h"
#include "common/gemm.h"

namespace {

using namespace k3::gemm;
using k3::bf16;
using k3::vf;

constexpr int kHidden = K3_HIDDEN;
constexpr int kWidth = K3_DENSE_WIDTH;
static_assert(kHidden % 32 == 0 && kWidth % 32 == 0, "products run over K in steps of 32");

struct Call {
  const bf16* x;
  const bf16* w_gate_up;
  const bf16* w_down;
  bf16* out;
  int64_t m;
  k3::Situ situ;
  Walk walk;
};

struct Scratch {
  alignas(64) bf16 x[acts_elems(kMaxTokens, kHidden)];
  alignas(64) bf16 h[acts_elems(kMaxTokens, kWidth)];
};
static_assert(sizeof(Scratch) <= K3_SCRATCH_BYTES, "one block of tokens fits");

template <class Form>
void mlp(const Call& call, const Team& team, Scratch& scratch) {
  const MatrixUnit<Form> unit;
  for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
    const int tokens = int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens);
    if (m0 > 0) team.barrier();  // the block before may still be reading h
    const bf16* acts = Form::stage(team, call.x + m0 * kHidden, tokens, kHidden, scratch.x);
    if (Form::kPacked) team.barrier();
    const GateUp gate_up{call.w_gate_up, kHidden, kWidth};
    for_tiles<2, Form>(gate_up, team.share(2 * kWidth / kTile, 2), call.walk, kHidden, acts, tokens,
                       [&](int64_t t, int p, const Tile* c, int valid) {
                         bf16* h = scratch.h + p * kTile * kWidth;
                         store_situ<Form>(c[0], c[1], call.situ, h, kWidth, t / 2 * kTile, valid);
                       });
    team.barrier();
    for_tiles<1, Form>(Weights{call.w_down, kWidth}, team.share(kHidden / kTile), call.walk, kWidth, scratch.h, tokens,
                       [&](int64_t t, int p, const Tile* c, int valid) {
                         Form::store_bf16(*c, call.out + (m0 + p * kTile) * kHidden + t * kTile, kHidden, valid);
                       });
  }
}

}  // namespace

K3_EXPORT(dense_mlp) {
  k3::Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call call{};
  call.x = k3::bind<const bf16>(in, {k3::kAny, kHidden}, "x must be [M, hidden]", &call.m);
  call.w_gate_up = k3::bind<const bf16>(in, {2 * kWidth, kHidden}, "w_gate_up must be [2 * dense_width, hidden]");
  call.w_down = k3::bind<const bf16>(in, {kHidden, kWidth}, "w_down must be [hidden, dense_width]");
  call.out = k3::bind<bf16>(in, {call.m, kHidden}, "out must be [M, hidden]");
  call.situ.beta = in.real();
  call.situ.linear_beta = in.real();
  const Tunables tunables(in);
  call.walk = tunables.walk;
  if (in.finish()) return -1;
  Scratch& scratch = *static_cast<Scratch*>(ctx->scratch);
  k3::parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const Team team{ctx, worker, workers};
    tunables.packed ? mlp<Panels>(call, team, scratch) : mlp<Rows>(call, team, scratch);
  });
  return 0;
}
