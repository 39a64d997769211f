#include "entropy/rans_vectors.hpp"

#if defined(SHRINKPOINT_X86)
namespace shrinkpoint {

namespace {

// Loads base[index] for sixteen indices below 2^16.
SHRINKPOINT_INLINE512 __m512i load16(__m512i indices, const uint32_t* base) {
    const __m256i narrow = _mm512_cvtepi32_epi16(indices);
    const __m128i low = _mm256_castsi256_si128(narrow), high = _mm256_extracti128_si256(narrow, 1);
    const auto a = static_cast<uint64_t>(_mm_cvtsi128_si64(low)), b = static_cast<uint64_t>(_mm_extract_epi64(low, 1));
    const auto c = static_cast<uint64_t>(_mm_cvtsi128_si64(high)), d = static_cast<uint64_t>(_mm_extract_epi64(high, 1));
    const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(load4(a, base)), load4(b, base), 1);
    const __m256i cd = _mm256_inserti128_si256(_mm256_castsi128_si256(load4(c, base)), load4(d, base), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1);
}

SHRINKPOINT_INLINE512 __m512i bytes16(const uint8_t* bytes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// For sixteen slots: the frequencies of their symbols, and how far each slot is behind its symbol's first.
struct Step {
    __m512i frequency, place;
};

// Renormalises sixteen states after a symbol.
SHRINKPOINT_INLINE512 __m512i advanced(__m512i states, const Step& step, const uint8_t*& next) {
    const __m512i high = _mm512_srli_epi32(states, kProbabilityBits);
    const __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(step.frequency, high), step.place);
    const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(kRansLow));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
    next += 2 * __builtin_popcount(low);
    return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, words));
}

// Looks every slot up.
class BySlot {
   public:
    static constexpr bool kTriesFirst = false;

    SHRINKPOINT_INLINE512 explicit BySlot(const DecoderTables& tables) : entries_(tables.entries.data()) {}

    template <bool ContextTables>
    SHRINKPOINT_INLINE512 Step get(__m512i slots, const uint8_t* tables, uint8_t* symbols) {
        __m512i index = slots;
        if (ContextTables) index = _mm512_or_si512(_mm512_slli_epi32(bytes16(tables), kProbabilityBits), index);
        const __m512i entry = load16(index, entries_);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(entry));
        const __m512i less_one = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xfff));
        return {_mm512_add_epi32(less_one, _mm512_set1_epi32(1)), _mm512_srli_epi32(entry, 20)};
    }

    size_t misses() const { return 0; }

   private:
    const uint32_t* entries_;
};

// Compares slots with the ends of the first symbols' slots. Looks all sixteen up if one of them is of another symbol.
class ByEnds {
   public:
    static constexpr bool kTriesFirst = false;

    SHRINKPOINT_INLINE512 explicit ByEnds(const DecoderTables& tables) : by_slot_(tables) {
        for (unsigned s = 0; s < DecoderTables::kFirst; ++s) ends_[s] = _mm512_loadu_si512(tables.ends[s]);
    }

    template <bool ContextTables>
    SHRINKPOINT_INLINE512 Step get(__m512i slots, const uint8_t* tables, uint8_t* symbols) {
        const __m512i table = ContextTables ? bytes16(tables) : _mm512_setzero_si512();
        const __m512i first = _mm512_permutexvar_epi32(table, ends_[0]);
        const __m512i second = _mm512_permutexvar_epi32(table, ends_[1]);
        const __m512i third = _mm512_permutexvar_epi32(table, ends_[2]);
        if (__builtin_expect(_mm512_cmpge_epu32_mask(slots, third) != 0, 0)) {
            ++misses_;
            return by_slot_.get<ContextTables>(slots, tables, symbols);
        }
        const __mmask16 not_first = _mm512_cmpge_epu32_mask(slots, first);
        const __mmask16 is_third = _mm512_cmpge_epu32_mask(slots, second);
        const __m128i one = _mm_set1_epi8(1);
        const __m128i symbol = _mm_maskz_mov_epi8(not_first, one);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm_mask_add_epi8(symbol, is_third, symbol, one));
        const __m512i begin = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(not_first, first), is_third, second);
        const __m512i end = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(first, not_first, second), is_third, third);
        return {_mm512_sub_epi32(end, begin), _mm512_sub_epi32(slots, begin)};
    }

    size_t misses() const { return misses_; }

   protected:
    BySlot by_slot_;
    __m512i ends_[DecoderTables::kFirst];
    size_t misses_ = 0;
};

// Decodes rounds of nothing but first symbols, after which no lane needs a word, and others as `ByEnds` does.
class ByFirst : public ByEnds {
   public:
    static constexpr bool kTriesFirst = true;

    SHRINKPOINT_INLINE512 explicit ByFirst(const DecoderTables& tables) : ByEnds(tables) {}

    // Decodes a round of 32 lanes and returns true, or changes nothing and returns false.
    template <bool ContextTables>
    SHRINKPOINT_INLINE512 bool decode_first(__m512i& low, __m512i& high, const uint8_t* tables, uint8_t* symbols) {
        __mmask16 others = 0;
        const __m512i next_low = advanced<ContextTables>(low, tables, others);
        const __m512i next_high = advanced<ContextTables>(high, from<ContextTables>(tables, 16), others);
        if (__builtin_expect(others != 0, 0)) {
            ++missed_rounds_;
            return false;
        }
        low = next_low, high = next_high;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols), _mm256_setzero_si256());
        return true;
    }

    size_t misses() const { return missed_rounds_; }

   private:
    // The states after the first symbol. Lanes with another symbol, or that need a word, are added to `others`.
    template <bool ContextTables>
    SHRINKPOINT_INLINE512 __m512i advanced(__m512i states, const uint8_t* tables, __mmask16& others) const {
        const __m512i slots = _mm512_and_si512(states, _mm512_set1_epi32(kProbabilityScale - 1));
        const __m512i table = ContextTables ? bytes16(tables) : _mm512_setzero_si512();
        const __m512i frequency = _mm512_permutexvar_epi32(table, ends_[0]);
        const __m512i high = _mm512_srli_epi32(states, kProbabilityBits);
        const __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, high), slots);
        others |= _mm512_cmpge_epu32_mask(slots, frequency) | _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(kRansLow));
        return x;
    }

    size_t missed_rounds_ = 0;
};

template <LookUp Kind>
using TablesOf = std::conditional_t<Kind == LookUp::First, ByFirst,
                                    std::conditional_t<Kind == LookUp::Ends, ByEnds, BySlot>>;

// Decodes one symbol of each of sixteen lanes.
template <bool ContextTables, typename Tables>
SHRINKPOINT_INLINE512 __m512i get16(__m512i states, Tables& all, const uint8_t* tables, uint8_t* symbols,
                                    const uint8_t*& next) {
    const __m512i slots = _mm512_and_si512(states, _mm512_set1_epi32(kProbabilityScale - 1));
    return advanced(states, all.template get<ContextTables>(slots, tables, symbols), next);
}

// The states of a stream's lanes, and where it reads.
template <bool ContextTables>
class Lanes {
   public:
    SHRINKPOINT_INLINE512 explicit Lanes(const DecodeRun& run)
        : tables_(run.tables),
          symbols_(run.symbols),
          next_(run.next),
          end_(run.end),
          low_(_mm512_loadu_si512(run.states)),
          high_(_mm512_loadu_si512(run.states + 16)) {}

    SHRINKPOINT_INLINE512 bool can_read() const { return end_ - next_ >= static_cast<ptrdiff_t>(kRoundReach); }

    // Decodes the round of symbols from i on if all of them are first ones.
    SHRINKPOINT_INLINE512 bool decode_first(size_t i, ByFirst& all) {
        return all.template decode_first<ContextTables>(low_, high_, from<ContextTables>(tables_, i), symbols_ + i);
    }

    template <typename Tables>
    SHRINKPOINT_INLINE512 void decode_low(size_t i, Tables& all) {
        low_ = get16<ContextTables>(low_, all, from<ContextTables>(tables_, i), symbols_ + i, next_);
    }

    template <typename Tables>
    SHRINKPOINT_INLINE512 void decode_high(size_t i, Tables& all) {
        high_ = get16<ContextTables>(high_, all, from<ContextTables>(tables_, i + 16), symbols_ + i + 16, next_);
    }

    SHRINKPOINT_INLINE512 void store(DecodeRun& run) const {
        run.next = next_;
        _mm512_storeu_si512(run.states, low_);
        _mm512_storeu_si512(run.states + 16, high_);
    }

   private:
    const uint8_t* const tables_;  // pointers of its own: a byte that is stored might change those of a run
    uint8_t* const symbols_;
    const uint8_t* next_;
    const uint8_t* const end_;
    __m512i low_, high_;
};

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX512 size_t decode_one(DecodeRun& run, size_t count, const DecoderTables& tables, size_t& misses) {
    Tables all(tables);
    Lanes<ContextTables> lanes(run);
    size_t i = 0;
    for (; i + kMaxLanes <= count && lanes.can_read(); i += kMaxLanes) {
        if constexpr (Tables::kTriesFirst)
            if (lanes.decode_first(i, all)) continue;
        lanes.decode_low(i, all), lanes.decode_high(i, all);
    }
    lanes.store(run);
    misses = all.misses();
    return i;
}

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX512 size_t decode_two(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                                     size_t& misses) {
    Tables all(tables);
    Lanes<ContextTables> a_lanes(a), b_lanes(b);
    size_t i = 0;
    for (; i + kMaxLanes <= count && a_lanes.can_read() && b_lanes.can_read(); i += kMaxLanes) {
        if constexpr (Tables::kTriesFirst) {
            const bool is_a_done = a_lanes.decode_first(i, all), is_b_done = b_lanes.decode_first(i, all);
            if (__builtin_expect(!is_a_done, 0)) a_lanes.decode_low(i, all), a_lanes.decode_high(i, all);
            if (__builtin_expect(!is_b_done, 0)) b_lanes.decode_low(i, all), b_lanes.decode_high(i, all);
        } else {
            a_lanes.decode_low(i, all), b_lanes.decode_low(i, all);
            a_lanes.decode_high(i, all), b_lanes.decode_high(i, all);
        }
    }
    a_lanes.store(a), b_lanes.store(b);
    misses = all.misses();
    return i;
}

// The number k in lane k.
SHRINKPOINT_INLINE512 __m256i iota16() {
    return _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// What an encoder needs for sixteen symbols. A reciprocal is at most 1 / frequency, and below it by at most 2^-21 of
// it.
struct Entries {
    __m512i frequency, cumulative;
    __m512 reciprocal;
};

SHRINKPOINT_INLINE512 Entries unpacked(__m512i entry, __m512 reciprocal) {
    return {_mm512_and_si512(entry, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(entry, 16), reciprocal};
}

// Tables of at most PackedTables::kRegisterEntries entries, held in registers.
class EntriesInRegisters {
   public:
    SHRINKPOINT_INLINE512 explicit EntriesInRegisters(const PackedTables& tables)
        : symbol_bits_(_mm_cvtsi32_si128(static_cast<int>(tables.symbol_bits))) {
        for (unsigned k = 0; k < kRegisters; ++k) {
            entries_[k] = _mm512_loadu_si512(tables.entries.data() + 16 * k);
            reciprocals_[k] = _mm512_loadu_ps(tables.reciprocals.data() + 16 * k);
        }
    }

    template <bool ContextTables>
    SHRINKPOINT_INLINE512 Entries at(const uint8_t* symbols, const uint8_t* tables) const {
        __m512i index = bytes16(symbols);
        if (ContextTables) index = _mm512_or_si512(_mm512_sll_epi32(bytes16(tables), symbol_bits_), index);
        const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        const __m512i low = _mm512_permutex2var_epi32(entries_[0], index, entries_[1]);
        const __m512i high = _mm512_permutex2var_epi32(entries_[2], index, entries_[3]);
        const __m512 low_reciprocal = _mm512_permutex2var_ps(reciprocals_[0], index, reciprocals_[1]);
        const __m512 high_reciprocal = _mm512_permutex2var_ps(reciprocals_[2], index, reciprocals_[3]);
        return unpacked(_mm512_mask_blend_epi32(upper, low, high),
                        _mm512_mask_blend_ps(upper, low_reciprocal, high_reciprocal));
    }

   private:
    static constexpr unsigned kRegisters = PackedTables::kRegisterEntries / 16;
    __m128i symbol_bits_;
    __m512i entries_[kRegisters];
    __m512 reciprocals_[kRegisters];
};

class EntriesInMemory {
   public:
    SHRINKPOINT_INLINE512 explicit EntriesInMemory(const PackedTables& tables) : entries_(tables.entries.data()) {}

    template <bool ContextTables>
    SHRINKPOINT_INLINE512 Entries at(const uint8_t* symbols, const uint8_t* tables) const {
        __m512i index = bytes16(symbols);
        if (ContextTables) index = _mm512_or_si512(_mm512_slli_epi32(bytes16(tables), 8), index);
        Entries out = unpacked(load16(index, entries_), _mm512_setzero_ps());
        const __m512 divisor = _mm512_cvtepi32_ps(out.frequency), rough = _mm512_rcp14_ps(divisor);
        const __m512 below_two = _mm512_set1_ps(2 - 0x1p-22f);  // below 2 by more than the rounding error
        out.reciprocal = _mm512_mul_ps(rough, _mm512_fnmadd_ps(rough, divisor, below_two));
        return out;
    }

   private:
    const uint32_t* entries_;
};

// Encodes one symbol in each of sixteen lanes. The words that the lanes emit go in front of `next`.
SHRINKPOINT_INLINE512 __m512i put16(__m512i states, const Entries& symbols, uint8_t*& next) {
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states, 20), symbols.frequency);
    const auto emitted = static_cast<unsigned>(__builtin_popcount(emit));
    // The words are rotated to the end of the register so that a whole register can be stored: masked stores are slow.
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(emit, states));
    const __m256i turn = _mm256_add_epi16(iota16(), _mm256_set1_epi16(static_cast<int16_t>(emitted)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next - 32), _mm256_permutexvar_epi16(turn, words));
    next -= 2 * emitted;
    // The quotient is below 2^20. All roundings are down, so it is right or too small by 1, and the remainder tells
    // which.
    constexpr int kDown = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    const __m512i x = _mm512_mask_srli_epi32(states, emit, states, 16);
    const __m512 rounded = _mm512_cvt_roundepu32_ps(x, kDown);
    const __m512i quotient = _mm512_cvttps_epi32(_mm512_mul_round_ps(rounded, symbols.reciprocal, kDown));
    const __m512i unused = _mm512_sub_epi32(_mm512_set1_epi32(kProbabilityScale), symbols.frequency);
    const __m512i sum = _mm512_add_epi32(x, _mm512_mullo_epi32(quotient, unused));
    const __m512i rest = _mm512_sub_epi32(sum, _mm512_slli_epi32(quotient, kProbabilityBits));
    const __mmask16 small = _mm512_cmpge_epu32_mask(rest, symbols.frequency);
    const __m512i next_states = _mm512_add_epi32(sum, symbols.cumulative);
    return _mm512_mask_add_epi32(next_states, small, next_states, unused);
}

template <typename Tables, bool ContextTables>
SHRINKPOINT_AVX512 void encode_all(const uint8_t* symbols, const uint8_t* tables, size_t count,
                                   const PackedTables& packed, uint32_t* states, uint8_t*& next) {
    const Tables entries(packed);
    __m512i first = _mm512_loadu_si512(states), second = _mm512_loadu_si512(states + 16);
    uint8_t* at = next;
    for (size_t i = count; i > 0;) {
        i -= kMaxLanes;
        const uint8_t* const table = from<ContextTables>(tables, i);
        second = put16(second, entries.template at<ContextTables>(symbols + i + 16, from<ContextTables>(table, 16)), at);
        first = put16(first, entries.template at<ContextTables>(symbols + i, table), at);
    }
    next = at;
    _mm512_storeu_si512(states, first);
    _mm512_storeu_si512(states + 16, second);
}

template <typename Tables>
void encode_with(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                 uint32_t* states, uint8_t*& next) {
    if (tables != nullptr)
        encode_all<Tables, true>(symbols, tables, count, packed, states, next);
    else
        encode_all<Tables, false>(symbols, tables, count, packed, states, next);
}

}  // namespace

size_t decode_rounds_avx512(DecodeRun& run, size_t count, const DecoderTables& tables, Pauses& pauses) {
    return by_likely_symbols(1, 16, tables, pauses, [&](auto kind, size_t& misses) {
        using Tables = TablesOf<decltype(kind)::value>;
        return run.tables != nullptr ? decode_one<true, Tables>(run, count, tables, misses)
                                     : decode_one<false, Tables>(run, count, tables, misses);
    });
}

size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables, Pauses& pauses) {
    return by_likely_symbols(2, 16, tables, pauses, [&](auto kind, size_t& misses) {
        using Tables = TablesOf<decltype(kind)::value>;
        return a.tables != nullptr ? decode_two<true, Tables>(a, b, count, tables, misses)
                                   : decode_two<false, Tables>(a, b, count, tables, misses);
    });
}

void encode_rounds_avx512(const uint8_t* symbols, const uint8_t* tables, size_t count, const PackedTables& packed,
                          uint32_t* states, uint8_t*& next) {
    if (packed.reciprocals.empty())
        encode_with<EntriesInMemory>(symbols, tables, count, packed, states, next);
    else
        encode_with<EntriesInRegisters>(symbols, tables, count, packed, states, next);
}

}  // namespace shrinkpoint
#endif
