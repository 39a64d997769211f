"""What becomes of a tensor on the wire: one operator a file."""

from shrinkpoint.comm.operators.base import PLAIN as PLAIN
from shrinkpoint.comm.operators.base import Context as Context
from shrinkpoint.comm.operators.base import Operator as Operator
from shrinkpoint.comm.operators.cast import Cast as Cast
from shrinkpoint.comm.operators.exact import Exact as Exact
from shrinkpoint.comm.operators.uniform import Uniform as Uniform
