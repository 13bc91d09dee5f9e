"""Learn one policy that allocates incentives under a return-on-investment target.

policy = Policy.from_pretrained("runs/calibrated/policy")
amounts = policy.allocate(history, multiplier)
"""

from goal.config import PolicyConfig
from goal.log import History
from goal.model import Generation, Policy
from goal.tokenizer import IncentiveTokenizer

__version__ = "0.1.0"

__all__ = ["Generation", "History", "IncentiveTokenizer", "Policy", "PolicyConfig", "__version__"]
