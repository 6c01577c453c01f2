-- schedule: member_taken_over
-- The position moves with whichever batch is finished, although an older one is open.
select pg_temp.mutate('gdq.finish_batch', 'if b.batch_no = pos.batch_no + 1 then', 'if true then');
