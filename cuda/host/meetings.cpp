// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Who meets whom at a barrier or a warp collective, and what is said of those who do not come.
#include "block.h"

#include <cstdio>

namespace metrale::host {
namespace {

constexpr unsigned kNamedAbsentees = 3;

bool same_call(const Site& a, const Site& b) { return a.name == b.name && a.line == b.line; }

std::string to_string(const Site& site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(site.name) + " (" + (slash ? slash + 1 : site.file) + ":" + std::to_string(site.line) +
           ")";
}

std::string to_string(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) +
           ")";
}

std::string in_mask(unsigned mask) {
    char text[24];
    std::snprintf(text, sizeof text, "mask 0x%08x", mask);
    return text;
}

} // namespace

void Worker::fail_at(const Site& site, const std::string& what) {
    fail("is at " + to_string(site) + ": " + what);
}

int Worker::meet_block(const Site& site, Vote vote, int predicate) {
    if (!meeting_.arrived)
        meeting_.site = &site;
    else if (!same_call(site, *meeting_.site))
        fail("is at " + to_string(site) + " while thread " + to_string(meeting_.sleepers.first->index) +
             " waits at " + to_string(*meeting_.site));
    ++meeting_.arrived;
    meeting_.votes += predicate != 0;
    meeting_.vote = vote;
    meeting_.sleepers.push(*current_);
    current_->in_block_meeting = true;
    if (meeting_.arrived == expected())
        close_block_meeting();
    sleep(site);
    return meeting_.result; // the next meeting cannot close before this thread has come to it
}

void Worker::close_block_meeting() {
    const unsigned votes = meeting_.votes;
    meeting_.result = static_cast<int>(meeting_.vote == Vote::any   ? votes != 0
                                       : meeting_.vote == Vote::all ? votes == meeting_.arrived
                                                                    : votes);
    meeting_.arrived = meeting_.votes = 0;
    ready_.splice(meeting_.sleepers);
}

uint64_t Worker::meet_warp(const Site& site, unsigned mask, Combine combine, uint64_t value, unsigned source,
                           bool exits_count) {
    Warp& warp = warp_of(*current_);
    const unsigned self = lane(), bit = 1u << self;
    if (!(mask & bit))
        fail_at(site, "its lane " + std::to_string(self) + " is outside the " + in_mask(mask));
    if (!(mask >> source & 1) && combine == combine_shuffle)
        fail_at(site, "it reads lane " + std::to_string(source) + ", outside the " + in_mask(mask));
    warp.lanes.value[self] = value;
    warp.lanes.source[self] = static_cast<uint8_t>(source);

    unsigned slot = 0;
    for (; slot < warp.n_open; ++slot) {
        const Meeting& open = warp.open[slot];
        if (open.mask == mask && same_call(site, *open.site))
            break;
        if (open.arrived & mask && open.mask & bit) // each waits for the other
            fail("is at " + to_string(site) + " with " + in_mask(mask) + " while thread " +
                 to_string(open.sleepers.first->index) + " waits at " + to_string(*open.site) + " with " +
                 in_mask(open.mask));
    }
    if (slot == warp.n_open)
        warp.open[warp.n_open++] = {&site, combine, mask, 0, exits_count, {}};
    Meeting& meeting = warp.open[slot];
    meeting.arrived |= bit;
    meeting.sleepers.push(*current_);
    current_->in_block_meeting = false;
    if (complete(warp, meeting))
        close_warp_meeting(warp, slot);
    sleep(site);
    return warp.lanes.value[self];
}

bool Worker::complete(const Warp& warp, const Meeting& meeting) const {
    const unsigned excused = !meeting.exits_count ? 0 : launch_->config.strict ? warp.absent : warp.exited;
    return !(meeting.mask & ~meeting.arrived & ~excused);
}

void Worker::close_warp_meeting(Warp& warp, unsigned slot) {
    Meeting& meeting = warp.open[slot];
    meeting.combine(warp.lanes, meeting.arrived);
    ready_.splice(meeting.sleepers);
    meeting = warp.open[--warp.n_open];
}

std::string Worker::locate(const Thread& thread) const {
    return "kernel " + std::string(launch_->kernel.name) + ", block " + to_string(blockIdx) + ", thread " +
           to_string(thread.index);
}

std::string Worker::absentee(unsigned rank) const {
    if (rank >= threads_.size())
        return "lane " + std::to_string(rank % kWarp) + " (not in the block)";
    const Thread& thread = threads_[rank];
    return "thread " + to_string(thread.index) +
           (thread.state == Thread::State::exited ? " (exited)"
                                                  : " (waits at " + to_string(*thread.site) + ")");
}

// Every live thread sleeps. Tells of a sleeper at the block's barrier, or else of any.
std::string Worker::explain_deadlock() {
    const Thread* sleeper = meeting_.sleepers.first;
    for (unsigned rank = 0; !sleeper; ++rank)
        if (threads_[rank].state == Thread::State::asleep)
            sleeper = &threads_[rank];

    std::vector<unsigned> absent;
    if (sleeper->in_block_meeting) {
        for (const Thread& thread : threads_)
            if (thread.state == Thread::State::exited ? launch_->config.strict : !thread.in_block_meeting)
                absent.push_back(thread.rank);
    } else {
        const Warp& warp = warp_of(*sleeper);
        const unsigned self = 1u << sleeper->rank % kWarp,
                       excused = launch_->config.strict ? warp.absent : warp.exited;
        for (unsigned slot = 0; slot < warp.n_open; ++slot) {
            const Meeting& open = warp.open[slot];
            if (open.arrived & self)
                for_each_lane(open.mask & ~open.arrived & ~(open.exits_count ? excused : 0),
                              [&](unsigned lane) { absent.push_back(sleeper->rank / kWarp * kWarp + lane); });
        }
    }
    std::string text = locate(*sleeper) + " waits at " + to_string(*sleeper->site) + ", not reached by ";
    for (size_t i = 0; i < absent.size() && i < kNamedAbsentees; ++i)
        text += (i ? ", " : "") + absentee(absent[i]);
    if (absent.size() > kNamedAbsentees)
        text += " and " + std::to_string(absent.size() - kNamedAbsentees) + " more";
    return text;
}

} // namespace metrale::host
