// Paged attention for CPUs: FlashAttention (arXiv 2205.14135) over chunks of keys, and Flash-Decoding's splits of the
// keys where a step has fewer tasks than threads. Elements T are float or bfloat16; softmax and sums are float32.
//
// The queries of all heads that share a KV head are columns, query by query: column c of a row is query c / group,
// head c % group. Sixteen columns, the lanes of a vector, are a strip. Scores are computed transposed, [key][column],
// and so is the output, [dim][column]: maximum, exponential and sum of the softmax are then plain vector operations,
// and keys and values are read once for all their heads. Only how the two products are computed differs:
// (Keys and values stored in 8 bits are widened where they are read; their scales multiply scores and probabilities.)
// VectorProducts on any processor, AmxProducts for bfloat16 where there is AMX, FewColumnProducts where a strip would
// be mostly empty.
//
// The headers of this folder are parts of this file, in the order in which they are included here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "amx.h"
#include "element.h"
#include "thread_pool.h"
#include "vectors.h"

#include "stored.h"
#include "call.h"
#include "softmax.h"
#include "split.h"
#include "scratch.h"
#include "vector_products.h"
#include "few_column_products.h"
#include "amx_products.h"

namespace {

StripState state_of(const Shape& shape, float* states, int64_t strip) {
    return {states + strip * StripState::floats(shape.out_dims())};
}

// Strips `strip` up to, not including, `strip + STRIPS` attend to `count` packed keys, those from `first_key` on. A
// task's last key may be there several times to fill a group, at positions that no column sees. Inlined into the whole
// call its loops would run out of registers: vector products take 5 to 10 % longer.
template <class Products, int STRIPS, class CallType>
[[gnu::noinline]] void attend(const CallType& call, const Task& task, Scratch& scratch, float* states, int64_t strip,
                              int64_t first_key, int64_t count) {
    const Op& op = call.op;
    const int32_t* last_keys = scratch.last_keys + strip * LANES;
    // Counted from first_key and up to, not including, the end: some column sees keys any_begin to any_end, every
    // column keys all_begin to all_end.
    const int32_t first = last_keys[0], last = last_keys[STRIPS * LANES - 1];
    const int64_t all_end = first + 1 - first_key, any_end = last + 1 - first_key;
    const int64_t any_begin = op.first_key(first) - first_key, all_begin = op.first_key(last) - first_key;
    const int64_t begin = std::max<int64_t>(0, any_begin) / KEY_GROUP * KEY_GROUP;
    const int64_t end = std::min(count, round_up(any_end, KEY_GROUP));
    if (begin >= end) return;

    Products::template multiply_keys<STRIPS>(call, task, scratch, strip, begin, end);
    float* out[STRIPS];
    for (int s = 0; s < STRIPS; s++) {
        const StripState state = state_of(call, states, strip + s);
        float* scores = scratch.scores + s * CHUNK_KEYS * LANES;
        if (CallType::SCALED) scale_scores(scratch.key_scales, scores, begin, end);
        if (op.soft_cap > 0) apply_soft_cap(op, scores, begin, end);
        apply_mask(op, last_keys + s * LANES, first_key, scores, begin, std::min(all_begin, end));
        apply_mask(op, last_keys + s * LANES, first_key, scores, std::max({begin, all_begin, all_end}), end);
        for (int p = 0; p < task.parts(); p++)
            softmax_part(p, scores, state, exponent_factor(op), call.out_dims(), begin, end,
                         [&scratch, s, p](int64_t key, part first, part second) {
                             if (CallType::SCALED) {
                                 first *= scratch.value_scales[key];
                                 second *= scratch.value_scales[key + 1];
                             }
                             Products::put_probs(scratch, s, key, p, first, second);
                         });
        out[s] = state.out();
    }
    Products::template add_values<STRIPS>(call, task, scratch, out, begin, end);
}

template <class Products, class CallType>
void run_task(const CallType& call, const Task& task, Scratch& scratch, float* states) {
    const int64_t strips = task.strips();
    for (int64_t strip = 0; strip < strips; strip++) {
        state_of(call, states, strip).clear(call.out_dims());
        Products::pack_queries(call, task, scratch, strip);
    }
    for (int64_t i = 0; i < strips * LANES; i++)  // lanes without a column see what the last column sees
        scratch.last_keys[i] = call.last_key(task.row, task.first_column + std::min(i, task.num_columns - 1));
    for (int64_t key = task.first_key; key < task.end_key; key += CHUNK_KEYS) {
        const int64_t count = round_up(std::min<int64_t>(CHUNK_KEYS, task.end_key - key), KEY_GROUP);
        find_keys(call, task, key, count + PREFETCH_KEYS, scratch.offsets);
        if constexpr (CallType::SCALED) {
            const Scales& scales = call.scales;
            find_scales(call, task, scales.keys, scales.per_token, scratch.offsets, count, scratch.key_scales);
            find_scales(call, task, scales.values, scales.per_token, scratch.offsets, count, scratch.value_scales);
        }
        Products::pack_keys(call, scratch, count);
        int64_t strip = 0;
        for (; strip + PAIRED_STRIPS <= strips; strip += PAIRED_STRIPS)
            attend<Products, PAIRED_STRIPS>(call, task, scratch, states, strip, key, count);
        if (strip < strips) attend<Products, 1>(call, task, scratch, states, strip, key, count);
    }
}

// A logit of no key joins the sums of each column's head.
void add_sinks(const Shape& shape, const Task& task, int64_t strip, StripState state) {
    const int64_t group = shape.group(), first = task.first_column + strip * LANES;
    for (int64_t lane = 0; lane < LANES; lane++) {
        const float sink = shape.op.sinks[task.kv_head * group + (first + lane) % group] * LOG2_E;
        const float before = state.column_max()[lane], largest = std::max(before, sink);
        const float factor = std::exp2(before - largest);
        for (int64_t i = 1; i < shape.out_dims() + 2; i++) state.memory[i * LANES + lane] *= factor;
        state.column_max()[lane] = largest;
        state.column_sum()[lane] += std::exp2(sink - largest);
    }
}

// Where a column sees no key, what is there already is left.
template <typename T>
void store_lse(const Call<T>& call, const Task& task, int64_t strip, StripState state) {
    const Columns columns = find_columns(call, task, strip, call.op.num_heads, 1);
    for (int64_t lane = 0; lane < columns.count; lane++)
        if (call.last_key(task.row, task.first_column + strip * LANES + lane) >= 0)
            call.lse[columns.offset[lane]] =
                (state.column_max()[lane] + std::log2(state.column_sum()[lane])) / LOG2_E;
}

// Divide by the sums and store.
template <typename T>
void finish(const Call<T>& call, const Task& task, float* states) {
    const int64_t out_dim = call.op.out_dim;
    for (int64_t strip = 0; strip < task.strips(); strip++) {
        const StripState state = state_of(call, states, strip);
        if (call.op.sinks != nullptr) add_sinks(call, task, strip, state);
        if (call.lse != nullptr) store_lse(call, task, strip, state);
        state.divide(call.out_dims());
        const Columns columns = find_columns(call, task, strip, call.op.num_heads * out_dim, out_dim);
        for (int64_t dim = 0; dim < out_dim; dim += LANES) {
            alignas(64) float rows[LANES * LANES];
            transpose(state.out() + dim * LANES, LANES, rows);
            for (int64_t lane = 0; lane < columns.count; lane++)
                store_narrow(call.out + columns.offset[lane] + dim, rows + lane * LANES,
                             std::min<int64_t>(LANES, out_dim - dim));
        }
    }
}

// The splits of one KV head, of which `first` is the first.
template <typename T>
void merge(const Call<T>& call, const Task* first) {
    for (int64_t split = 1; split < first->num_splits; split++) {
        float* others = first[split * call.op.num_kv_heads].states;
        for (int64_t strip = 0; strip < first->strips(); strip++)
            state_of(call, first->states, strip).merge(state_of(call, others, strip), call.out_dims());
    }
    finish(call, *first, first->states);
}

template <class Products, class CallType>
void run(const CallType& call) {
    using FewColumns = FewColumnProducts<typename CallType::Element, typename CallType::Stored>;
    Plan plan = make_plan(call, thread_pool->threads());
    const int64_t num_tasks = plan.tasks.size();
    place_states(call, plan, splits_arena().reserve(plan.state_floats));
    parallel(num_tasks, 1, plan.work, [&](Pieces& pieces) {
        Scratch scratch(scratch_arena(), plan.most_strips, call.dims());
        [[maybe_unused]] const typename Products::Session session;
        while (pieces.take()) {
            const Task& task = plan.tasks[pieces.first];
            float* states = task.states != nullptr ? task.states : scratch.states;
            if (FewColumns::suits(call, task, Products::FEW_COLUMNS))
                run_task<FewColumns>(call, task, scratch, states);
            else
                run_task<Products>(call, task, scratch, states);
            if (task.states == nullptr) finish(call, task, states);
        }
    });
    if (plan.state_floats == 0) return;
    parallel_for(num_tasks, plan.state_floats, [&](int64_t i) {
        if (plan.tasks[i].num_splits > 1 && plan.tasks[i].split == 0) merge(call, &plan.tasks[i]);
    });
}

template <typename S>
void attention(const CachedCall<float, S>& call, bool) {
    run<VectorProducts<float>>(call);
}

template <typename S>
void attention(const CachedCall<bfloat16, S>& call, [[maybe_unused]] bool use_amx) {
#if HAS_AMX
    if (use_amx) return run<AmxProducts>(call);
#endif

    run<VectorProducts<bfloat16>>(call);
}

}  // namespace
