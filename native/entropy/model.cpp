#include "entropy/model.hpp"

#include "base/error.hpp"

namespace shrinkpoint {

namespace {

void require(bool holds, const char* message) {
    if (!holds) throw Corrupt(message);
}

}  // namespace

void check(const Model& model, const Arrays& arrays, bool factors) {
    const bool narrow = model.width == 8 || model.width == 16, wide = model.width == 32 || model.width == 64;
    require(narrow || wide, "a recipe's width is none of 8, 16, 32, 64");
    require(model.mantissa < model.width - 1, "a recipe's mantissa is wider than its values");
    require(model.bias > -(1 << 20) && model.bias < 1 << 20, "a recipe's bias is out of range");
    require(model.top >= 0 && model.top < 1 << 12, "a recipe's largest exponent is out of range");
    const bool level = model.tokens == Tokens::Level, delta = model.tokens == Tokens::Delta;
    const bool codes = model.tokens == Tokens::Codes;
    if (level) {
        require(model.mantissa > 0 && model.width > 8, "levels are for floats of 16 bits or more");
        require(model.fine <= model.mantissa && model.shift <= model.mantissa - model.fine,
                "a recipe leaves less than no mantissa bits");
    }
    require(level || (model.companion == Companion::None && !factors), "only levels have companions and factors");
    if (factors)
        require(model.width <= 32 && model.mantissa > model.fine, "factors are for floats of 16 and 32 bits");
    require(delta || codes || model.predictor == Predictor::None, "only deltas and codes have predictors");
    if (codes) {
        require(model.width == 8 && model.mantissa == 0 && model.shift == 0, "codes are whole bytes");
        require(model.predictor == Predictor::None || model.predictor == Predictor::Base,
                "codes are predicted from nothing but the parent's");
        require(model.top < 256, "a recipe's largest code is out of range");
    }
    require(!delta || model.shift < model.width, "a recipe's shift leaves no bits");
    if (model.predictor == Predictor::Adam || model.predictor == Predictor::Square) {
        require(model.width == 32 && model.mantissa == 23, "optimizer steps are predicted in 32-bit floats");
        require(arrays.moment1 != nullptr, "a prediction from moments needs a first moment");
        if (model.predictor == Predictor::Adam)
            require(arrays.moment2 != nullptr, "a prediction of a step needs a second moment");
        else
            require(arrays.moment1_base != nullptr, "a prediction of a square needs the parent's first moment");
    }
    const bool needs_base = model.predictor != Predictor::None || model.companion == Companion::Base;
    require(!needs_base || arrays.base != nullptr, "a recipe needs a base and has none");
    if (model.companion == Companion::Moment1)
        require(arrays.moment1 != nullptr && model.width - model.mantissa == 9 && model.fine <= 23,
                "a first moment is compared only with floats of the same exponent");
}

}  // namespace shrinkpoint
