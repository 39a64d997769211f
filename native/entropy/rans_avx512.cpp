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

   private:
    BySlot by_slot_;
    __m512i ends_[DecoderTables::kFirst];
    size_t misses_ = 0;
};

// Decodes one symbol of each of sixteen lanes.
template <bool ContextTables, typename Tables>
SHRINKPOINT_INLINE512 __m512i get16(__m512i states, Tables& all, const uint8_t* tables, uint8_t* symbols,
                                    const uint8_t*& next) {
    const __m512i slots = _mm512_and_si512(states, _mm512_set1_epi32(kProbabilityScale - 1));
    return advanced(states, all.template get<ContextTables>(slots, tables, symbols), next);
}

constexpr ptrdiff_t kReach = kRoundReach;

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX512 size_t decode_one(DecodeRun& run, size_t count, const DecoderTables& tables, size_t& misses) {
    Tables all(tables);
    __m512i first = _mm512_loadu_si512(run.states), second = _mm512_loadu_si512(run.states + 16);
    const uint8_t* at = run.next;
    size_t i = 0;
    for (; i + kMaxLanes <= count && run.end - at >= kReach; i += kMaxLanes) {
        first = get16<ContextTables>(first, all, from<ContextTables>(run.tables, i), run.symbols + i, at);
        second = get16<ContextTables>(second, all, from<ContextTables>(run.tables, i + 16), run.symbols + i + 16, at);
    }
    run.next = at;
    _mm512_storeu_si512(run.states, first);
    _mm512_storeu_si512(run.states + 16, second);
    misses = all.misses();
    return i;
}

template <bool ContextTables, typename Tables>
SHRINKPOINT_AVX512 size_t decode_two(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                                     size_t& misses) {
    Tables all(tables);
    __m512i a1 = _mm512_loadu_si512(a.states), a2 = _mm512_loadu_si512(a.states + 16);
    __m512i b1 = _mm512_loadu_si512(b.states), b2 = _mm512_loadu_si512(b.states + 16);
    const uint8_t *at = a.next, *bt = b.next;
    size_t i = 0;
    for (; i + kMaxLanes <= count && a.end - at >= kReach && b.end - bt >= kReach; i += kMaxLanes) {
        a1 = get16<ContextTables>(a1, all, from<ContextTables>(a.tables, i), a.symbols + i, at);
        b1 = get16<ContextTables>(b1, all, from<ContextTables>(b.tables, i), b.symbols + i, bt);
        a2 = get16<ContextTables>(a2, all, from<ContextTables>(a.tables, i + 16), a.symbols + i + 16, at);
        b2 = get16<ContextTables>(b2, all, from<ContextTables>(b.tables, i + 16), b.symbols + i + 16, bt);
    }
    a.next = at, b.next = bt;
    _mm512_storeu_si512(a.states, a1);
    _mm512_storeu_si512(a.states + 16, a2);
    _mm512_storeu_si512(b.states, b1);
    _mm512_storeu_si512(b.states + 16, b2);
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

size_t decode_rounds_avx512(DecodeRun& run, size_t count, const DecoderTables& tables, unsigned& turns_by_slot) {
    return by_ends_or_slots(1, 16, tables, turns_by_slot, [&](auto by_ends, size_t& misses) {
        using Tables = std::conditional_t<by_ends, ByEnds, BySlot>;
        return run.tables != nullptr ? decode_one<true, Tables>(run, count, tables, misses)
                                     : decode_one<false, Tables>(run, count, tables, misses);
    });
}

size_t decode_rounds_avx512(DecodeRun& a, DecodeRun& b, size_t count, const DecoderTables& tables,
                            unsigned& turns_by_slot) {
    return by_ends_or_slots(2, 16, tables, turns_by_slot, [&](auto by_ends, size_t& misses) {
        using Tables = std::conditional_t<by_ends, ByEnds, BySlot>;
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
