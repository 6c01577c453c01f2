"""What tests share: fixtures, servers, workloads and grammars."""
