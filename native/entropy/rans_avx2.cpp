#include "entropy/rans_vectors.hpp"

#if defined(SHRINKPOINT_X86)
namespace shrinkpoint {

namespace {

constexpr unsigned kLanes = 8, kRegisters = kMaxLanes / kLanes;

// Shuffles of eight 16-bit words for every mask of eight lanes.
struct Shuffles {
    alignas(16) uint8_t compress[256][16];  // words of the mask's lanes to the end; other words are arbitrary
    alignas(16) uint8_t expand[256][16];    // leading words to the mask's lanes, zeros to the others
};

constexpr Shuffles make_shuffles() {
    Shuffles out{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        unsigned count = 0;
        for (unsigned lane = 0; lane < kLanes; ++lane) count += mask >> lane & 1;
        for (unsigned lane = 0, before = 0; lane < kLanes; ++lane) {
            const bool is_set = (mask >> lane & 1) != 0;
            for (unsigned byte = 0; byte < 2; ++byte) {
                const auto from = static_cast<uint8_t>(2 * before + byte);
                out.expand[mask][2 * lane + byte] = is_set ? from : 0x80;
                if (is_set)
                    out.compress[mask][2 * (kLanes - count + before) + byte] = static_cast<uint8_t>(2 * lane + byte);
            }
            before += is_set;
        }
    }
    return out;
}

constexpr Shuffles kShuffles = make_shuffles();

SHRINKPOINT_INLINE256 __m128i shuffle(const uint8_t (&all)[256][16], unsigned mask) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(all[mask]));
}

SHRINKPOINT_INLINE256 __m128i load8(const uint8_t* bytes) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
}

SHRINKPOINT_INLINE256 __m256i load(const uint32_t* words) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}

// The low 16 bits of eight words.
SHRINKPOINT_INLINE256 __m128i narrowed(__m256i words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

// The low bytes of eight words.
SHRINKPOINT_INLINE256 void store_bytes(__m256i words, uint8_t* out) {
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(words, first);
    const __m128i all = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), all);
}

// ---- decoding ------------------------------------------------------------------------------------------------------

// For eight slots: the frequencies of their symbols, and how far each slot is behind its symbol's first.
struct Step {
    __m256i frequency, place;
};

// Renormalises eight states after a symbol.
SHRINKPOINT_INLINE256 __m256i advanced(__m256i states, const Step& step, const uint8_t*& next) {
    const __m256i high = _mm256_srli_epi32(states, kProbabilityBits);
    const __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(step.frequency, high), step.place);
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(next));
    next += 2 * __builtin_popcount(mask);
    const __m256i taken = _mm256_cvtepu16_epi32(_mm_shuffle_epi8(words, shuffle(kShuffles.expand, mask)));
    return _mm256_or_si256(_mm256_sllv_epi32(x, _mm256_and_si256(low, _mm256_set1_epi32(16))), taken);
}

// Looks every slot up.
class BySlot {
   public:
    static constexpr bool kTriesFirst = false;

    SHRINKPOINT_INLINE256 explicit BySlot(const DecoderTables& tables) : entries_(tables.entries.data()) {}

    template <bool ContextTables>
    SHRINKPOINT_INLINE256 Step get(__m256i slots, const uint8_t* tables, uint8_t* symbols) {
        __m256i index = slots;
        if (ContextTables)
            index = _mm256_or_si256(_mm256_slli_epi32(_mm256_cvtepu8_epi32(load8(tables)), kProbabilityBits), index);
        const __m128i indices =
            _mm_packus_epi32(_mm256_castsi256_si128(index), _mm256_extracti128_si256(index, 1));
        const auto low = static_cast<uint64_t>(_mm_cvtsi128_si64(indices));
        const auto high = static_cast<uint64_t>(_mm_extract_epi64(indices, 1));
        const __m256i entry = _mm256_set_m128i(load4(high, entries_), load4(low, entries_));
        store_bytes(entry, symbols);
        const __m256i less_one = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xfff));
        return {_mm256_add_epi32(less_one, _mm256_set1_epi32(1)), _mm256_srli_epi32(entry, 20)};
    }

    size_t misses() const { return 0; }

   private:
    const uint32_t* entries_;
};

// Compares slots with the ends of the first symbols' slots. Looks all eight up if one of them is of another symbol.
class ByEnds {
   public:
    static constexpr bool kTriesFirst = false;

    SHRINKPOINT_INLINE256 explicit ByEnds(const DecoderTables& tables) : by_slot_(tables), ends_(tables.ends) {}

    template <bool ContextTables>
    SHRINKPOINT_INLINE256 Step get(__m256i slots, const uint8_t* tables, uint8_t* symbols) {
        const __m256i table = ContextTables ? _mm256_cvtepu8_epi32(load8(tables)) : _mm256_setzero_si256();
        const __m256i first = end<ContextTables>(0, table), second = end<ContextTables>(1, table);
        const __m256i third = end<ContextTables>(2, table);
        const __m256i hit = _mm256_cmpgt_epi32(third, slots);
        if (__builtin_expect(_mm256_movemask_epi8(hit) != -1, 0)) {
            ++misses_;
            return by_slot_.get<ContextTables>(slots, tables, symbols);
        }
        const __m256i is_first = _mm256_cmpgt_epi32(first, slots), below_third = _mm256_cmpgt_epi32(second, slots);
        const __m256i both = _mm256_add_epi32(is_first, below_third);  // -2, -1, 0 for the symbols 0, 1, 2
        store_bytes(_mm256_add_epi32(both, _mm256_set1_epi32(2)), symbols);
        const __m256i begin = chosen(below_third, _mm256_andnot_si256(is_first, first), second);
        const __m256i end = chosen(below_third, chosen(is_first, first, second), third);
        return {_mm256_sub_epi32(end, begin), _mm256_sub_epi32(slots, begin)};
    }

    size_t misses() const { return misses_; }

   protected:
    static SHRINKPOINT_INLINE256 __m256i chosen(__m256i mask, __m256i a, __m256i b) {
        return _mm256_blendv_epi8(b, a, mask);
    }

    // The end of one symbol's slots in each lane's table.
    template <bool ContextTables>
    SHRINKPOINT_INLINE256 __m256i end(unsigned symbol, __m256i table) const {
        const uint32_t* const ends = ends_[symbol];
        if (!ContextTables) return _mm256_set1_epi32(static_cast<int>(ends[0]));
        const __m256i low = _mm256_permutevar8x32_epi32(load(ends), table);
        const __m256i high = _mm256_permutevar8x32_epi32(load(ends + kLanes), table);
        const __m256i is_high = _mm256_slli_epi32(table, 28);  // bit 3 becomes the sign
        return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high),
                                                    _mm256_castsi256_ps(is_high)));
    }

    BySlot by_slot_;
    const uint32_t (*ends_)[DecoderTables::kMaxTables];
    size_t misses_ = 0;
};

// Decodes rounds of nothing but first symbols, after which no lane needs a word, and others as `ByEnds` does.
class ByFirst : public ByEnds {
   public:
    static constexpr bool kTriesFirst = true;

    SHRINKPOINT_INLINE256 explicit ByFirst(const DecoderTables& tables) : ByEnds(tables) {}

    // The states after the first symbol. `is_right` becomes false in lanes with another symbol, or that need a word.
    template <bool ContextTables>
    SHRINKPOINT_INLINE256 __m256i advanced(__m256i states, const uint8_t* tables, __m256i& is_right) const {
        const __m256i slots = _mm256_and_si256(states, _mm256_set1_epi32(kProbabilityScale - 1));
        const __m256i table = ContextTables ? _mm256_cvtepu8_epi32(load8(tables)) : _mm256_setzero_si256();
        const __m256i frequency = end<ContextTables>(0, table);
        const __m256i high = _mm256_srli_epi32(states, kProbabilityBits);
        const __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(frequency, high), slots);
        const __m256i needs_word = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
        const __m256i is_first = _mm256_cmpgt_epi32(frequency, slots);
        is_right = _mm256_and_si256(is_right, _mm256_andnot_si256(needs_word, is_first));
        return x;
    }

    void miss() { ++missed_rounds_; }
    size_t misses() const { return missed_rounds_; }

   private:
    size_t missed_rounds_ = 0;
};

template <LookUp Kind>
using TablesOf = std::conditional_t<Kind == LookUp::First, ByFirst,
                                    std::conditional_t<Kind == LookUp::Ends, ByEnds, BySlot>>;

// The states of a stream's lanes, and where it reads.
template <bool ContextTables>
class Lanes {
   public:
    SHRINKPOINT_INLINE256 explicit Lanes(const DecodeRun& run)
        : tables_(run.tables), symbols_(run.symbols), next_(run.next), end_(run.end) {
        for (unsigned k = 0; k < kRegisters; ++k) states_[k] = load(run.states + kLanes * k);
    }

    SHRINKPOINT_INLINE256 bool can_read() const { return end_ - next_ >= static_cast<ptrdiff_t>(kRoundReach); }

    // Decodes the round of symbols from i on if all of them are first ones.
    SHRINKPOINT_INLINE256 bool decode_first(size_t i, ByFirst& all) {
        __m256i is_right = _mm256_set1_epi32(-1), next[kRegisters];
#pragma GCC unroll 4
        for (unsigned k = 0; k < kRegisters; ++k)
            next[k] = all.template advanced<ContextTables>(states_[k], from<ContextTables>(tables_, i + kLanes * k),
                                                           is_right);
        if (__builtin_expect(_mm256_movemask_epi8(is_right) != -1, 0)) {
            all.miss();
            return false;
        }
#pragma GCC unroll 4
        for (unsigned k = 0; k < kRegisters; ++k) states_[k] = next[k];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols_ + i), _mm256_setzero_si256());
        return true;
    }

    // Decodes the round of symbols from i on.
    template <typename Tables>
    SHRINKPOINT_INLINE256 void decode_round(size_t i, Tables& all) {
        if constexpr (Tables::kTriesFirst)
            if (decode_first(i, all)) return;
#pragma GCC unroll 4
        for (unsigned k = 0; k < kRegisters; ++k) decode(k, i, all);
    }

    // Decodes symbol i of the k-th eight lanes.
    template <typename Tables>
    SHRINKPOINT_INLINE256 void decode(unsigned k, size_t i, Tables& all) {
        const __m256i slots = _mm256_and_si256(states_[k], _mm256_set1_epi32(kProbabilityScale - 1));
        const size_t at = i + kLanes * k;
        const Step step = all.template get<ContextTables>(slots, from<ContextTables>(tables_, at), symbols_ + at);
        states_[k] = advanced(states_[k], step, next_);
    }

    SHRINKPOINT_INLINE256 void store(DecodeRun& run) const {
        run.next = next_;
        for (unsigned k = 0; k < kRegisters; ++k)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(run.states + kLanes * k), states_[k]);
    }

   private:
    const uint8_t* const tables_;  // pointers of its own: a byte that is stored might change those of a run
    uint8_t* const symbols_;
    const uint8_t* next_;
    const uint8_t* const end_;
    __m256i states_[kRegisters];
};

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX2 size_t decode_one(DecodeRun& run, size_t count, const DecoderTables& tables, size_t& misses) {
    Tables all(tables);
    Lanes<ContextTables> lanes(run);
    size_t i = 0;
    for (; i + kMaxLanes <= count && lanes.can_read(); i += kMaxLanes) lanes.decode_round(i, all);
    lanes.store(run);
    misses = all.misses();
    return i;
}

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX2 size_t decode_two(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                                   size_t& misses) {
    Tables all(tables);
    Lanes<ContextTables> a_lanes(a), b_lanes(b);
    size_t i = 0;
    for (; i + kMaxLanes <= count && a_lanes.can_read() && b_lanes.can_read(); i += kMaxLanes) {
        if constexpr (Tables::kTriesFirst) {
            a_lanes.decode_round(i, all), b_lanes.decode_round(i, all);
        } else {
#pragma GCC unroll 4
            for (unsigned k = 0; k < kRegisters; ++k) a_lanes.decode(k, i, all), b_lanes.decode(k, i, all);
        }
    }
    a_lanes.store(a), b_lanes.store(b);
    misses = all.misses();
    return i;
}

// ---- encoding ------------------------------------------------------------------------------------------------------

// What an encoder needs for eight symbols.
struct Entries {
    __m256i frequency, cumulative, reciprocal;
};

// Two entries of 64 bits, at 16-bit indices.
SHRINKPOINT_INLINE256 __m128 pair(const uint64_t* entries, uint64_t first, uint64_t second) {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(entries + (first & 0xffff)));
    return _mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(entries + (second & 0xffff)));
}

template <bool ContextTables>
SHRINKPOINT_INLINE256 Entries entries_at(const uint8_t* symbols, const uint8_t* tables, const uint64_t* entries) {
    const __m128i table = ContextTables ? load8(tables) : _mm_setzero_si128();
    const __m128i indices = _mm_unpacklo_epi8(load8(symbols), table);  // table << 8 | symbol
    const auto low = static_cast<uint64_t>(_mm_cvtsi128_si64(indices));
    const auto high = static_cast<uint64_t>(_mm_extract_epi64(indices, 1));
    const __m256 a = _mm256_set_m128(pair(entries, high, high >> 16), pair(entries, low, low >> 16));
    const __m256 b = _mm256_set_m128(pair(entries, high >> 32, high >> 48), pair(entries, low >> 32, low >> 48));
    const __m256i entry = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    return {_mm256_and_si256(entry, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(entry, 16),
            _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))};
}

// The upper halves of eight products of 32 bits.
SHRINKPOINT_INLINE256 __m256i upper_product(__m256i a, __m256i b) {
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xaa);
}

// Encodes one symbol in each of eight lanes. The words that the lanes emit go in front of `next`.
SHRINKPOINT_INLINE256 __m256i put8(__m256i states, const Entries& symbols, uint8_t*& next) {
    const __m256i stay = _mm256_cmpgt_epi32(symbols.frequency, _mm256_srli_epi32(states, 20));
    const unsigned emit = ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(stay))) & 0xff;
    const __m128i words = _mm_shuffle_epi8(narrowed(states), shuffle(kShuffles.compress, emit));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(next - 16), words);
    next -= 2 * __builtin_popcount(emit);
    const __m256i x = _mm256_srlv_epi32(states, _mm256_andnot_si256(stay, _mm256_set1_epi32(16)));
    // The reciprocal is rounded down, so the quotient is right or too small by 1, and the remainder tells which.
    const __m256i quotient = upper_product(x, symbols.reciprocal);
    const __m256i rest = _mm256_sub_epi32(x, _mm256_mullo_epi32(quotient, symbols.frequency));
    const __m256i exact = _mm256_cmpgt_epi32(symbols.frequency, rest);
    const __m256i missing = _mm256_andnot_si256(exact, _mm256_sub_epi32(_mm256_set1_epi32(kProbabilityScale), symbols.frequency));
    const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(quotient, kProbabilityBits), rest);
    return _mm256_add_epi32(_mm256_add_epi32(sum, symbols.cumulative), missing);
}

template <bool ContextTables>
SHRINKPOINT_AVX2 void encode_all(const uint8_t* symbols, const uint8_t* tables, size_t count, const uint64_t* entries,
                                 uint32_t* states, uint8_t*& next) {
    __m256i lanes[kRegisters];
    for (unsigned k = 0; k < kRegisters; ++k) lanes[k] = load(states + kLanes * k);
    uint8_t* at = next;
    for (size_t i = count; i > 0;) {
        i -= kMaxLanes;
#pragma GCC unroll 4
        for (unsigned done = 0; done < kRegisters; ++done) {
            const unsigned k = kRegisters - 1 - done;
            const size_t place = i + kLanes * k;
            const uint8_t* const table = from<ContextTables>(tables, place);
            lanes[k] = put8(lanes[k], entries_at<ContextTables>(symbols + place, table, entries), at);
        }
    }
    next = at;
    for (unsigned k = 0; k < kRegisters; ++k)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + kLanes * k), lanes[k]);
}

}  // namespace

size_t decode_rounds_avx2(DecodeRun& run, size_t count, const DecoderTables& tables, Pauses& pauses) {
    return by_likely_symbols(1, kLanes, tables, pauses, [&](auto kind, size_t& misses) {
        using Tables = TablesOf<decltype(kind)::value>;
        return run.tables != nullptr ? decode_one<true, Tables>(run, count, tables, misses)
                                     : decode_one<false, Tables>(run, count, tables, misses);
    });
}

size_t decode_rounds_avx2(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables, Pauses& pauses) {
    return by_likely_symbols(2, kLanes, tables, pauses, [&](auto kind, size_t& misses) {
        using Tables = TablesOf<decltype(kind)::value>;
        return a.tables != nullptr ? decode_two<true, Tables>(a, b, count, tables, misses)
                                   : decode_two<false, Tables>(a, b, count, tables, misses);
    });
}

void encode_rounds_avx2(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                        uint32_t* states, uint8_t*& next) {
    const uint64_t* const entries = packed.with_reciprocals.data();
    if (tables != nullptr)
        encode_all<true>(symbols, tables, count, entries, states, next);
    else
        encode_all<false>(symbols, tables, count, entries, states, next);
}

}  // namespace shrinkpoint
#endif
