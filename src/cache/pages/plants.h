// cache/pages/plants.h: mistakes that can be switched on, to prove that the tests would notice them.
//
// LQ_PLANT(name) is false in every build but that of the plant test, which compiles pages/ and owner/ a second time
// with LIVEQUANT_PLANTS. Each plant stands in product code where the mistake would be made;
// tests/cache/owner/plants_test.cc demands that the random test catches every one. Source: cache_core.md 8, "Plants".
#pragma once

// X(name, what goes wrong)
#define LQ_PLANT_LIST(X)                                                                         \
  X(kMarkIgnored, "two siblings share row slots: claims never look at the mark")                 \
  X(kScarIgnored, "a short group joins a group whose qparams exist")                             \
  X(kFrontierIsStaged, "f becomes `staged` after a partial accept")                              \
  X(kClosurePastAccepted, "the closure at seal runs although not all rows were accepted")        \
  X(kDraftNotCut, "a draft runs past a group edge: groups close over rows that may be rejected") \
  X(kEntryByPosition, "truncate counts entries by position / page rows")                         \
  X(kNoFenceTruncate, "an older transaction survives a truncate")                                \
  X(kNoFenceReorder, "an older transaction survives a reorder")                                  \
  X(kNoFenceRelease, "an older transaction survives a release")                                  \
  X(kPublishMissingLayer, "publish does not ask whether every layer was prepared")               \
  X(kLengthBeforePublish, "begin moves the length of the published view")                        \
  X(kLengthWithoutFrontier, "publish moves the length but not the frontier")                     \
  X(kAbortLeaks, "abort keeps the private view")                                                 \
  X(kTailNotCopied, "a fresh page replaces a shared tail, its rows are not copied")              \
  X(kCopyMissesRow, "a copy stops one row short")                                                \
  X(kTruncateKeepsFrontier, "a truncate inside a group keeps the old frontier")                  \
  X(kTruncateSkipsTensor, "a truncate forgets V")                                                \
  X(kFrontierMovesBack, "truncate sets f to frontier(len), not min(f, len)")                     \
  X(kReorderLeavesTails, "a reorder moves coded pages and leaves exact pages behind")            \
  X(kReclaimUnderReader, "a retired view is dropped although it is leased")                      \
  X(kCensusCountsTwice, "the census counts a shared page once for each owner")                   \
  X(kDoubleRelease, "a release drops the tables twice")                                          \
  X(kExactDroppedEarly, "an exact page goes when its first row is coded, not its last")          \
  X(kPinnedDropped, "pinned rows go like other exact rows")                                      \
  X(kWindowTooNarrow, "a page goes when it leaves the window in part")                           \
  X(kMarkBackTooFar, "publish puts a mark back below rows that it made visible")                 \
  X(kBatchNotAtomic, "a batch that fails keeps the transactions that it had begun")              \
  X(kPublishRepeats, "the receipt of a published transaction is not looked for")                 \
  X(kIdNotLookedFor, "a transition that comes again under its id is done again")                 \
  X(kIdContentIgnored, "an id that comes again with other content gets the old receipt")         \
  X(kExpiredIdIsNew, "an id that left the ring is taken as a new one")                           \
  X(kReclaimedEarly, "a release receipt counts as consumed while a reader holds the rows")       \
  X(kFreshNotPoisoned, "a fresh page shows the rows of its last owner")

#ifdef LIVEQUANT_PLANTS
namespace livequant::plants {
enum Plant : int {
  kNone,
#define LQ_PLANT_NAME(name, what) name,
  LQ_PLANT_LIST(LQ_PLANT_NAME)
#undef LQ_PLANT_NAME
};
inline int active = kNone;
}  // namespace livequant::plants
#define LQ_PLANT(name) (::livequant::plants::active == ::livequant::plants::name)
#else
#define LQ_PLANT(name) false
#endif
