"""TPC-H: its tables, its 22 queries with the parameters of their validation, and changes that reach each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from gdq.consumers.demo.data import DEMO_SCHEMA
from tests.support.waiting import SECONDS

TABLES = ("region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem")

SCHEMA = (
    DEMO_SCHEMA,
    "create table region (r_regionkey int primary key, r_name text not null, r_comment text not null)",
    """create table nation (n_nationkey int primary key, n_name text not null, n_regionkey int not null,
                            n_comment text not null)""",
    """create table supplier (
         s_suppkey int primary key, s_name text not null, s_address text not null, s_nationkey int not null,
         s_phone text not null, s_acctbal numeric(12,2) not null, s_comment text not null)""",
    """create table part (
         p_partkey int primary key, p_name text not null, p_mfgr text not null, p_brand text not null,
         p_type text not null, p_size int not null, p_container text not null, p_retailprice numeric(12,2) not null,
         p_comment text not null)""",
    """create table partsupp (
         ps_partkey int not null, ps_suppkey int not null, ps_availqty int not null,
         ps_supplycost numeric(12,2) not null, ps_comment text not null, primary key (ps_partkey, ps_suppkey))""",
)
INDEXES = (
    # what is joined by, and the columns of groups
    "nation (n_regionkey)",
    "supplier (s_nationkey)",
    "customer (c_nationkey)",
    "part (p_brand, p_type, p_size)",
    "partsupp (ps_suppkey)",
    "orders (o_custkey)",
    "lineitem (l_partkey, l_suppkey)",
    "lineitem (l_suppkey)",
)

QUERIES = {
    "q1": """
select l_returnflag, l_linestatus, sum(l_quantity) as sum_qty, sum(l_extendedprice) as sum_base_price,
       sum(l_extendedprice * (1 - l_discount)) as sum_disc_price,
       sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) as sum_charge, avg(l_quantity) as avg_qty,
       avg(l_extendedprice) as avg_price, avg(l_discount) as avg_disc, count(*) as count_order
  from lineitem where l_shipdate <= date '1998-12-01' - interval '90 days'
 group by l_returnflag, l_linestatus order by l_returnflag, l_linestatus""",
    "q2": """
select s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
  from part, supplier, partsupp, nation, region
 where p_partkey = ps_partkey and s_suppkey = ps_suppkey and p_size = 15 and p_type like '%BRASS'
   and s_nationkey = n_nationkey and n_regionkey = r_regionkey and r_name = 'EUROPE'
   and ps_supplycost = (select min(ps_supplycost) from partsupp, supplier, nation, region
                         where p_partkey = ps_partkey and s_suppkey = ps_suppkey and s_nationkey = n_nationkey
                           and n_regionkey = r_regionkey and r_name = 'EUROPE')
 order by s_acctbal desc, n_name, s_name, p_partkey limit 100""",
    "q3": """
select l_orderkey, sum(l_extendedprice * (1 - l_discount)) as revenue, o_orderdate, o_shippriority
  from customer, orders, lineitem
 where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey
   and o_orderdate < date '1995-03-15' and l_shipdate > date '1995-03-15'
 group by l_orderkey, o_orderdate, o_shippriority order by revenue desc, o_orderdate limit 10""",
    "q4": """
select o_orderpriority, count(*) as order_count from orders
 where o_orderdate >= date '1993-07-01' and o_orderdate < date '1993-07-01' + interval '3 months'
   and exists (select * from lineitem where l_orderkey = o_orderkey and l_commitdate < l_receiptdate)
 group by o_orderpriority order by o_orderpriority""",
    "q5": """
select n_name, sum(l_extendedprice * (1 - l_discount)) as revenue
  from customer, orders, lineitem, supplier, nation, region
 where c_custkey = o_custkey and l_orderkey = o_orderkey and l_suppkey = s_suppkey and c_nationkey = s_nationkey
   and s_nationkey = n_nationkey and n_regionkey = r_regionkey and r_name = 'ASIA'
   and o_orderdate >= date '1994-01-01' and o_orderdate < date '1994-01-01' + interval '1 year'
 group by n_name order by revenue desc""",
    "q6": """
select sum(l_extendedprice * l_discount) as revenue from lineitem
 where l_shipdate >= date '1994-01-01' and l_shipdate < date '1994-01-01' + interval '1 year'
   and l_discount between 0.06 - 0.01 and 0.06 + 0.01 and l_quantity < 24""",
    "q7": """
select supp_nation, cust_nation, l_year, sum(volume) as revenue
  from (select n1.n_name as supp_nation, n2.n_name as cust_nation, extract(year from l_shipdate) as l_year,
               l_extendedprice * (1 - l_discount) as volume
          from supplier, lineitem, orders, customer, nation n1, nation n2
         where s_suppkey = l_suppkey and o_orderkey = l_orderkey and c_custkey = o_custkey
           and s_nationkey = n1.n_nationkey and c_nationkey = n2.n_nationkey
           and ((n1.n_name = 'FRANCE' and n2.n_name = 'GERMANY') or (n1.n_name = 'GERMANY' and n2.n_name = 'FRANCE'))
           and l_shipdate between date '1995-01-01' and date '1996-12-31') as shipping
 group by supp_nation, cust_nation, l_year order by supp_nation, cust_nation, l_year""",
    "q8": """
select o_year, sum(case when nation = 'BRAZIL' then volume else 0 end) / sum(volume) as mkt_share
  from (select extract(year from o_orderdate) as o_year, l_extendedprice * (1 - l_discount) as volume,
               n2.n_name as nation
          from part, supplier, lineitem, orders, customer, nation n1, nation n2, region
         where p_partkey = l_partkey and s_suppkey = l_suppkey and l_orderkey = o_orderkey and o_custkey = c_custkey
           and c_nationkey = n1.n_nationkey and n1.n_regionkey = r_regionkey and r_name = 'AMERICA'
           and s_nationkey = n2.n_nationkey and o_orderdate between date '1995-01-01' and date '1996-12-31'
           and p_type = 'ECONOMY ANODIZED STEEL') as all_nations
 group by o_year order by o_year""",
    "q9": """
select nation, o_year, sum(amount) as sum_profit
  from (select n_name as nation, extract(year from o_orderdate) as o_year,
               l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity as amount
          from part, supplier, lineitem, partsupp, orders, nation
         where s_suppkey = l_suppkey and ps_suppkey = l_suppkey and ps_partkey = l_partkey and p_partkey = l_partkey
           and o_orderkey = l_orderkey and s_nationkey = n_nationkey and p_name like '%green%') as profit
 group by nation, o_year order by nation, o_year desc""",
    "q10": """
select c_custkey, c_name, sum(l_extendedprice * (1 - l_discount)) as revenue, c_acctbal, n_name, c_address, c_phone,
       c_comment
  from customer, orders, lineitem, nation
 where c_custkey = o_custkey and l_orderkey = o_orderkey and o_orderdate >= date '1993-10-01'
   and o_orderdate < date '1993-10-01' + interval '3 months' and l_returnflag = 'R' and c_nationkey = n_nationkey
 group by c_custkey, c_name, c_acctbal, c_phone, n_name, c_address, c_comment order by revenue desc limit 20""",
    "q11": """
select ps_partkey, sum(ps_supplycost * ps_availqty) as value from partsupp, supplier, nation
 where ps_suppkey = s_suppkey and s_nationkey = n_nationkey and n_name = 'GERMANY'
 group by ps_partkey
having sum(ps_supplycost * ps_availqty) > (
         select sum(ps_supplycost * ps_availqty) * 0.0001 from partsupp, supplier, nation
          where ps_suppkey = s_suppkey and s_nationkey = n_nationkey and n_name = 'GERMANY')
 order by value desc""",
    "q12": """
select l_shipmode,
       sum(case when o_orderpriority = '1-URGENT' or o_orderpriority = '2-HIGH' then 1 else 0 end) as high_line_count,
       sum(case when o_orderpriority <> '1-URGENT' and o_orderpriority <> '2-HIGH' then 1 else 0 end) as low_line_count
  from orders, lineitem
 where o_orderkey = l_orderkey and l_shipmode in ('MAIL', 'SHIP') and l_commitdate < l_receiptdate
   and l_shipdate < l_commitdate and l_receiptdate >= date '1994-01-01'
   and l_receiptdate < date '1994-01-01' + interval '1 year'
 group by l_shipmode order by l_shipmode""",
    "q13": """
select c_count, count(*) as custdist
  from (select c_custkey, count(o_orderkey) from customer
          left outer join orders on c_custkey = o_custkey and o_comment not like '%special%requests%'
         group by c_custkey) as c_orders (c_custkey, c_count)
 group by c_count order by custdist desc, c_count desc""",
    "q14": """
select 100.00 * sum(case when p_type like 'PROMO%' then l_extendedprice * (1 - l_discount) else 0 end)
       / sum(l_extendedprice * (1 - l_discount)) as promo_revenue
  from lineitem, part
 where l_partkey = p_partkey and l_shipdate >= date '1995-09-01'
   and l_shipdate < date '1995-09-01' + interval '1 month'""",
    "q15": """
with revenue (supplier_no, total_revenue) as (
  select l_suppkey, sum(l_extendedprice * (1 - l_discount)) from lineitem
   where l_shipdate >= date '1996-01-01' and l_shipdate < date '1996-01-01' + interval '3 months' group by l_suppkey)
select s_suppkey, s_name, s_address, s_phone, total_revenue from supplier, revenue
 where s_suppkey = supplier_no and total_revenue = (select max(total_revenue) from revenue) order by s_suppkey""",
    "q16": """
select p_brand, p_type, p_size, count(distinct ps_suppkey) as supplier_cnt from partsupp, part
 where p_partkey = ps_partkey and p_brand <> 'Brand#45' and p_type not like 'MEDIUM POLISHED%'
   and p_size in (49, 14, 23, 45, 19, 3, 36, 9)
   and ps_suppkey not in (select s_suppkey from supplier where s_comment like '%Customer%Complaints%')
 group by p_brand, p_type, p_size order by supplier_cnt desc, p_brand, p_type, p_size""",
    "q17": """
select sum(l_extendedprice) / 7.0 as avg_yearly from lineitem, part
 where p_partkey = l_partkey and p_brand = 'Brand#23' and p_container = 'MED BOX'
   and l_quantity < (select 0.2 * avg(l_quantity) from lineitem where l_partkey = p_partkey)""",
    "q18": """
select c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) as quantity
  from customer, orders, lineitem
 where o_orderkey in (select l_orderkey from lineitem group by l_orderkey having sum(l_quantity) > 300)
   and c_custkey = o_custkey and o_orderkey = l_orderkey
 group by c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice order by o_totalprice desc, o_orderdate limit 100""",
    "q19": """
select sum(l_extendedprice * (1 - l_discount)) as revenue from lineitem, part
 where (p_partkey = l_partkey and p_brand = 'Brand#12'
        and p_container in ('SM CASE', 'SM BOX', 'SM PACK', 'SM PKG') and l_quantity >= 1 and l_quantity <= 1 + 10
        and p_size between 1 and 5 and l_shipmode in ('AIR', 'AIR REG') and l_shipinstruct = 'DELIVER IN PERSON')
    or (p_partkey = l_partkey and p_brand = 'Brand#23'
        and p_container in ('MED BAG', 'MED BOX', 'MED PKG', 'MED PACK') and l_quantity >= 10 and l_quantity <= 10 + 10
        and p_size between 1 and 10 and l_shipmode in ('AIR', 'AIR REG') and l_shipinstruct = 'DELIVER IN PERSON')
    or (p_partkey = l_partkey and p_brand = 'Brand#34'
        and p_container in ('LG CASE', 'LG BOX', 'LG PACK', 'LG PKG') and l_quantity >= 20 and l_quantity <= 20 + 10
        and p_size between 1 and 15 and l_shipmode in ('AIR', 'AIR REG') and l_shipinstruct = 'DELIVER IN PERSON')""",
    "q20": """
select s_name, s_address from supplier, nation
 where s_suppkey in (
         select ps_suppkey from partsupp
          where ps_partkey in (select p_partkey from part where p_name like 'forest%')
            and ps_availqty > (select 0.5 * sum(l_quantity) from lineitem
                                where l_partkey = ps_partkey and l_suppkey = ps_suppkey
                                  and l_shipdate >= date '1994-01-01'
                                  and l_shipdate < date '1994-01-01' + interval '1 year'))
   and s_nationkey = n_nationkey and n_name = 'CANADA'
 order by s_name""",
    "q21": """
select s_name, count(*) as numwait from supplier, lineitem l1, orders, nation
 where s_suppkey = l1.l_suppkey and o_orderkey = l1.l_orderkey and o_orderstatus = 'F'
   and l1.l_receiptdate > l1.l_commitdate
   and exists (select * from lineitem l2 where l2.l_orderkey = l1.l_orderkey and l2.l_suppkey <> l1.l_suppkey)
   and not exists (select * from lineitem l3 where l3.l_orderkey = l1.l_orderkey and l3.l_suppkey <> l1.l_suppkey
                      and l3.l_receiptdate > l3.l_commitdate)
   and s_nationkey = n_nationkey and n_name = 'SAUDI ARABIA'
 group by s_name order by numwait desc, s_name limit 100""",
    "q22": """
select cntrycode, count(*) as numcust, sum(c_acctbal) as totacctbal
  from (select substring(c_phone from 1 for 2) as cntrycode, c_acctbal from customer
         where substring(c_phone from 1 for 2) in ('13', '31', '23', '29', '30', '18', '17')
           and c_acctbal > (select avg(c_acctbal) from customer where c_acctbal > 0.00
                               and substring(c_phone from 1 for 2) in ('13', '31', '23', '29', '30', '18', '17'))
           and not exists (select * from orders where o_custkey = c_custkey)) as custsale
 group by cntrycode order by cntrycode""",
}

# Transactions of one round; {r} is its number, from 1. Orders come and go with their lines, in windows of their keys.
_CHURN = (
    (
        """insert into orders select o_orderkey + {r} * 1000000, o_custkey, 'O', o_totalprice, o_orderdate,
             o_orderpriority, o_clerk, o_shippriority, o_comment
           from orders where o_orderkey between {r} * 1000 and {r} * 1000 + 200""",
        """insert into lineitem select l_orderkey + {r} * 1000000, l_partkey, l_suppkey, l_linenumber, l_quantity + 1,
             l_extendedprice, l_discount, l_tax, l_returnflag, 'O', l_shipdate, l_commitdate, l_receiptdate,
             l_shipinstruct, l_shipmode, l_comment
           from lineitem where l_orderkey between {r} * 1000 and {r} * 1000 + 200""",
    ),
    (
        """update lineitem set l_discount = 0.06, l_quantity = l_quantity / 2, l_suppkey = 1 + mod(l_suppkey, 100)
            where l_orderkey between {r} * 1000 + 201 and {r} * 1000 + 300""",
        """update orders set o_orderpriority = '2-HIGH', o_custkey = 1 + mod(o_custkey, 1500)
            where o_orderkey between {r} * 1000 + 250 and {r} * 1000 + 350""",
        "update orders set o_orderkey = -o_orderkey where o_orderkey between {r} * 1000 + 360 and {r} * 1000 + 395",
    ),
    (
        "delete from lineitem where l_orderkey between {r} * 1000 + 400 and {r} * 1000 + 500",
        "delete from orders where o_orderkey between {r} * 1000 + 400 and {r} * 1000 + 500",
        "delete from lineitem where l_orderkey between {r} * 1000 + 501 and {r} * 1000 + 550 and l_linenumber > 1",
    ),
    (
        "update customer set c_acctbal = c_acctbal + 1 where c_custkey < 100",
        "update customer set c_acctbal = c_acctbal - 1 where c_custkey < 100",
    ),
)
# What reaches the queries that such changes of a small database might pass by, and by whose name.
_AIMED = {
    "q2": "update supplier set s_acctbal = s_acctbal + 1 where s_nationkey in (6, 7, 19, 22, 23)",
    "q2 by cost": """update partsupp set ps_supplycost = ps_supplycost / 2 from part where p_partkey = ps_partkey
              and p_size = 15 and p_type like '%BRASS' and mod(ps_suppkey, 3) = {r}""",
    "q3, q10": """update lineitem set l_extendedprice = l_extendedprice + 100000 from orders, customer
              where l_orderkey = o_orderkey and c_custkey = o_custkey and mod(o_orderkey, 32) = {r} and l_linenumber = 1
                and (o_orderdate between '1995-03-01' and '1995-03-14' and c_mktsegment = 'BUILDING'
                     or o_orderdate between '1993-10-01' and '1993-12-31' and l_returnflag = 'R')""",
    "q5, q7": """update lineitem set l_extendedprice = l_extendedprice + 1 from orders, customer, supplier
              where l_orderkey = o_orderkey and c_custkey = o_custkey and l_suppkey = s_suppkey
                and (s_nationkey = c_nationkey or least(s_nationkey, c_nationkey) = 6
                     and greatest(s_nationkey, c_nationkey) = 7) and mod(l_linenumber, 4) = {r}""",
    "q8": "update part set p_type = 'ECONOMY ANODIZED STEEL' where mod(p_partkey, 10) = {r}",
    "q11": "update partsupp set ps_availqty = ps_availqty + 1 where mod(ps_partkey, 50) = {r}",
    "q14, q15": """update lineitem set l_extendedprice = l_extendedprice + 50000 * {r}
              where l_shipdate in ('1995-09-0{r}', '1996-02-0{r}') and mod(l_suppkey, 10) = {r}""",
    "q16": "update supplier set s_comment = 'Customer Complaints' where s_suppkey = {r}",
    "q17, q19": "update part set p_brand = 'Brand#23', p_container = 'MED BOX' where mod(p_partkey, 100) = {r}",
    "q17": """update lineitem set l_quantity = {r} from part where p_partkey = l_partkey and p_brand = 'Brand#23'
              and p_container = 'MED BOX' and l_linenumber = 2 + {r}""",
    "q18": """update lineitem set l_quantity = 50 where l_orderkey in (
              select l_orderkey from lineitem where l_linenumber = 7 order by l_orderkey offset {r} * 5 limit 2)""",
    "q19": """update lineitem set l_quantity = 15, l_shipmode = 'AIR', l_shipinstruct = 'DELIVER IN PERSON'
              from part where p_partkey = l_partkey and p_brand = 'Brand#23' and p_container like 'MED B%'
               and p_size <= 10 and l_linenumber = {r}""",
    "q20": """update part set p_name = 'forest ' || p_name where p_partkey in (
              select l_partkey from lineitem, supplier where s_suppkey = l_suppkey and s_nationkey = 3
                 and l_shipdate between '1994-01-01' and '1994-12-31' order by l_partkey offset {r} * 10 limit 3)""",
    "q21": """update lineitem set l_receiptdate = l_commitdate + 1 from supplier, orders where s_suppkey = l_suppkey
              and s_nationkey = 20 and o_orderkey = l_orderkey and o_orderstatus = 'F' and l_linenumber = {r}""",
    "q22": """insert into customer select c_custkey + {r} * 100000, c_name, c_address, c_nationkey, '13-' || c_phone,
              c_acctbal + 9000, c_mktsegment, c_comment from customer
              where c_custkey between {r} * 10 and {r} * 10 + 2""",
}

# A third of the changed lines each: orders with their lines come, lines are updated, orders with their lines go.
_LINES = (
    """insert into orders select o_orderkey + {offset}, o_custkey, 'O', o_totalprice, o_orderdate,
         o_orderpriority, o_clerk, o_shippriority, o_comment
       from orders where o_orderkey < {span} and o_orderkey % {step} = {residue}""",
    """insert into lineitem select l_orderkey + {offset}, l_partkey, l_suppkey, l_linenumber, l_quantity,
         l_extendedprice, l_discount, l_tax, l_returnflag, 'O', l_shipdate, l_commitdate, l_receiptdate,
         l_shipinstruct, l_shipmode, l_comment
       from lineitem where l_orderkey < {span} and l_orderkey % {step} = {residue}""",
    """update lineitem set l_quantity = 51 - l_quantity, l_extendedprice = l_extendedprice + 1
        where l_orderkey % {step} = {residue} + 1""",
    "delete from lineitem where l_orderkey % {step} = {residue} + 2",
    "delete from orders where o_orderkey % {step} = {residue} + 2",
)


def churn(number: int) -> list[list[str]]:
    """The transactions of one round, each a list of statements."""
    transactions = [*_CHURN, *((statement,) for statement in _AIMED.values())]
    return [[statement.format(r=number) for statement in statements] for statements in transactions]


def load(connection: psycopg.Connection[Any], folder: Path, scale: float) -> None:
    """Make and fill all tables, with indexes."""
    for statement in SCHEMA:
        connection.execute(statement)
    generator = Path(sys.executable).parent / "tpchgen-cli"
    command: list[str | Path] = [generator, "csv", "-s", str(scale), f"--output-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    for table in TABLES:
        with (
            (folder / f"{table}.csv").open("rb") as file,
            connection.cursor().copy(f"copy {table} from stdin (format csv, header)") as copy,
        ):
            while block := file.read(2**20):
                copy.write(block)
    for index in INDEXES:
        connection.execute(f"create index on {index}")
    connection.execute("vacuum analyze")


def change_lines(connection: psycopg.Connection[Any], scale: float, share: float, number: int, unit: int) -> int:
    """Change a share of the lines, in one transaction; how many that were.

    `number` chooses the lines, once each for one share; `unit` the keys of the new orders, once each.
    """
    # orders have the first eight of every 32 keys: an odd step meets them evenly
    step = max(round(3 / share), 3 * number + 4) | 1
    span = round(6_000_000 * scale) + 1
    lines = 0
    with connection.transaction():
        for statement in _LINES:
            text = statement.format(offset=unit * span, span=span, step=step, residue=3 * number)
            changed = connection.execute(text).rowcount
            lines += changed if "lineitem" in statement else 0
    return lines


def rows_read(connection: psycopg.Connection[Any]) -> int:
    """The rows of the tables that scans have handed out so far: of a table, by an index, or of an index alone."""
    connection.execute("select pg_stat_force_next_flush()")
    connection.execute("select pg_stat_clear_snapshot()")
    query = """select coalesce(sum(seq_tup_read + greatest(coalesce(idx_tup_fetch, 0),
                 (select sum(i.idx_tup_read) from pg_stat_user_indexes i where i.relid = t.relid))), 0)::bigint
                 from pg_stat_user_tables t where schemaname = 'public' and relname = any (%s)"""
    row = connection.execute(query, [list(TABLES)]).fetchone()
    return int(row[0]) if row else 0
