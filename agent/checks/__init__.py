"""The checks behind `prefetchd doctor`: one module per subject, each gathers facts and judges them apart."""
