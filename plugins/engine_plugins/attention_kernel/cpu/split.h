// How a step is cut into tasks: by columns, and where that gives too few or too long tasks, by keys, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call.h"
#include "softmax.h"

namespace {

constexpr int MIN_TASK_STRIPS = 4, MAX_TASK_STRIPS = 32;
constexpr int TASKS_PER_THREAD = 4;  // so that the last ones to finish are short
constexpr int MIN_SPLIT_KEYS = 256;

struct Plan {
    std::vector<Task> tasks;
    int64_t state_floats = 0;  // of all tasks that are merged
    int64_t most_strips = 0;   // of a task
    int64_t work = 0;          // keys times strips times dims; to read the keys counts as one strip more
};

int64_t work_of(const Task& task) { return (task.end_key - task.first_key) * (task.strips() + 1); }

int64_t columns_per_task(const Shape& shape, int64_t threads) {
    int64_t strips = 0;
    for (int64_t row = 0; row < shape.step.num_rows; row++)
        strips += divide_up(shape.step.q_len(row) * shape.group(), LANES) * shape.op.num_kv_heads;
    // Keys and values are packed once per task, so a task should have many columns; but all threads need tasks.
    const int64_t share = round_up(strips / (threads * TASKS_PER_THREAD), PAIRED_STRIPS);
    return std::clamp<int64_t>(share, MIN_TASK_STRIPS, MAX_TASK_STRIPS) * LANES;
}

// The step's columns in parts, each with all keys it sees, for one KV head; a row's longest parts first.
std::vector<Task> cut_columns(const Shape& shape, int64_t task_columns) {
    const Step& step = shape.step;
    std::vector<Task> parts;
    for (int64_t row = 0; row < step.num_rows; row++) {
        for (int64_t end = step.q_len(row) * shape.group(); end > 0;) {
            Task task;
            task.row = row;
            task.first_token = step.q_starts[row];
            task.first_column = (end - 1) / task_columns * task_columns;
            task.num_columns = end - task.first_column;
            task.end_key = shape.last_key(row, end - 1) + 1;
            task.first_key = std::max<int64_t>(0, shape.op.first_key(shape.last_key(row, task.first_column)));
            if (task.end_key > 0) parts.push_back(task);
            end = task.first_column;
        }
    }
    return parts;
}

// Flash-Decoding: what is more than a thread's share becomes several tasks over parts of its keys. Heads come
// innermost: their keys lie side by side in memory.
Plan make_plan(const Shape& shape, int64_t threads) {
    const int64_t heads = shape.op.num_kv_heads;
    Plan plan;
    const std::vector<Task> parts = cut_columns(shape, columns_per_task(shape, threads));
    for (const Task& part : parts) {
        plan.work += work_of(part) * heads * shape.op.head_dim;
        plan.most_strips = std::max(plan.most_strips, part.strips());
    }
    const int64_t share = plan.work / (threads * TASKS_PER_THREAD * shape.op.head_dim);
    for (Task task : parts) {
        const int64_t keys = task.end_key - task.first_key, end = task.end_key;
        const int64_t wanted = threads == 1 ? keys : std::max<int64_t>(share / (task.strips() + 1), MIN_SPLIT_KEYS);
        const int64_t split_keys = round_up(divide_up(keys, divide_up(keys, wanted)), KEY_GROUP);
        task.num_splits = divide_up(keys, split_keys);
        if (task.num_splits > 1)
            plan.state_floats += task.num_splits * heads * task.strips() * StripState::floats(shape.out_dims());
        for (; task.split < task.num_splits; task.split++, task.first_key = task.end_key) {
            task.end_key = std::min(end, task.first_key + split_keys);
            for (task.kv_head = 0; task.kv_head < heads; task.kv_head++) plan.tasks.push_back(task);
        }
    }
    return plan;
}

// Give every task that will be merged a place for its result.
void place_states(const Shape& shape, Plan& plan, float* memory) {
    for (Task& task : plan.tasks)
        if (task.num_splits > 1) {
            task.states = memory;
            memory += task.strips() * StripState::floats(shape.out_dims());
        }
}

}  // namespace
